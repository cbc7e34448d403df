"""What URLs of a Redis mean, and which are refused."""

from typing import Any

import pytest
import redis
from redis.connection import SSLConnection
from redis.sentinel import SentinelConnectionPool

from fairqueue.errors import ConfigurationError
from fairqueue.link.cluster import ClusterAddress
from fairqueue.link.urls import open_client, shown

SECRET = "hunter2"


def pool_of(url: str) -> SentinelConnectionPool:
    client = open_client(url)
    assert isinstance(client, redis.Redis)
    pool = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    return pool


def meaning(url: str) -> tuple[list[str], str, dict[str, Any]]:
    """Which sentinels are asked for which service, and how to log in at the primary."""
    pool = pool_of(url)
    places = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    ours = ("db", "username", "password", "socket_timeout")
    options = {name: value for name, value in pool.connection_kwargs.items() if name in ours}
    return [f"{each['host']} {each['port']}" for each in places], pool.service_name, options


@pytest.mark.parametrize(
    ("url", "sentinels", "service", "options"),
    [
        ("redis+sentinel://a:1,b:2/main/3", ["a 1", "b 2"], "main", {"db": 3}),
        ("redis+sentinel://a:1/main", ["a 1"], "main", {"db": 0}),
        ("redis+sentinel://a:1/main/", ["a 1"], "main", {"db": 0}),
        ("redis+sentinel://a,b:7/m/0/", ["a 26379", "b 7"], "m", {"db": 0}),
        ("redis+sentinel://[::1]:5,[fe80::2]/m", ["::1 5", "fe80::2 26379"], "m", {"db": 0}),
        (
            "redis+sentinel://u:p%40%2F%3A@a:1/m",
            ["a 1"],
            "m",
            {"db": 0, "username": "u", "password": "p@/:"},
        ),
        ("redis+sentinel://:p@a:1/m", ["a 1"], "m", {"db": 0, "password": "p"}),
        (
            "redis+sentinel://u:p@q@a:1/m",
            ["a 1"],
            "m",
            {"db": 0, "username": "u", "password": "p@q"},
        ),
        ("redis+sentinel://a:1/my%20own", ["a 1"], "my own", {"db": 0}),
        (
            "redis+sentinel://a:1/m?socket_timeout=2.5",
            ["a 1"],
            "m",
            {"db": 0, "socket_timeout": 2.5},
        ),
        ("redis+sentinel://a:1/m/1?db=2", ["a 1"], "m", {"db": 2}),
    ],
)
def test_a_sentinel_url_names_sentinels_service_and_database(
    url: str, sentinels: list[str], service: str, options: dict[str, Any]
) -> None:
    assert meaning(url) == (sentinels, service, options)


def test_sentinels_have_a_login_of_their_own() -> None:
    url = "redis+sentinel://u:p@a:1/m?sentinel_username=guard&sentinel_password=s%26t"
    pool = pool_of(url)
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("u", "p")
    (sentinel,) = pool.sentinel_manager.sentinels
    options = sentinel.connection_pool.connection_kwargs
    assert (options["username"], options["password"]) == ("guard", "s&t")


def test_tls_is_for_servers_and_sentinels_alike() -> None:
    pool = pool_of("rediss+sentinel://a:1/m?ssl_ca_certs=/dev/null")
    (sentinel,) = pool.sentinel_manager.sentinels
    for each in (pool, sentinel.connection_pool):
        assert issubclass(each.connection_class, SSLConnection)
        assert each.connection_kwargs["ssl_ca_certs"] == "/dev/null"


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6379/0",
        "redis://:p@localhost/15/",
        "redis://[::1]:6379",
        "rediss://u:p@host:6380/0?ssl_cert_reqs=required&ssl_ca_certs=/dev/null",
        "unix:///run/redis.sock?db=2&password=p",
        "redis://localhost?client_name=x&max_connections=5&decode_responses=true",
    ],
)
def test_other_urls_are_as_redis_py_has_them(url: str) -> None:
    client = open_client(url)
    assert isinstance(client, redis.Redis)
    assert not isinstance(client.connection_pool, SentinelConnectionPool)


@pytest.mark.parametrize(
    ("url", "nodes", "login"),
    [
        ("redis+cluster://a:1,b:2/", [("a", 1), ("b", 2)], (None, None)),
        ("redis+cluster://a", [("a", 6379)], (None, None)),
        ("redis+cluster://[::1]:5,[fe80::2]/0", [("::1", 5), ("fe80::2", 6379)], (None, None)),
        ("redis+cluster://u:p%40%2F%3A@a:1", [("a", 1)], ("u", "p@/:")),
        ("redis+cluster://:p@a:1/?db=0", [("a", 1)], (None, "p")),
        ("redis+cluster://u:p@q@a:1", [("a", 1)], ("u", "p@q")),
    ],
)
def test_a_cluster_url_names_some_of_its_nodes(
    url: str, nodes: list[tuple[str, int]], login: tuple[str | None, str | None]
) -> None:
    cluster = open_client(url)
    assert isinstance(cluster, ClusterAddress)
    options = cluster.pool.connection_kwargs
    assert list(cluster.nodes) == nodes
    assert (options.get("username"), options.get("password")) == login
    assert "p@" not in repr(cluster)


def test_the_options_of_a_cluster_are_those_of_its_nodes() -> None:
    url = "rediss+cluster://a:1,b:2/?ssl_ca_certs=/dev/null&socket_timeout=2.5"
    cluster = open_client(url)
    assert isinstance(cluster, ClusterAddress)
    assert issubclass(cluster.pool.connection_class, SSLConnection)
    assert cluster.pool.connection_kwargs["ssl_ca_certs"] == "/dev/null"
    assert cluster.pool.connection_kwargs["socket_timeout"] == 2.5


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://host:0", "port"),
        ("redis://host:65536", "port"),
        ("redis://host/zero", "database number"),
        ("redis://host/-1", "database number"),
        ("redis://host/0/1", "database number"),
        ("unix://", "no path"),
        ("valkey://host", "unix://, redis+sentinel:// or redis+cluster://"),
        ("redis+cluster://", "its nodes must be host:port,host:port,..."),
        ("redis+cluster://a:1,", "its nodes must be host:port"),
        ("redis+cluster://a:0", "its nodes must be host:port"),
        ("redis+cluster://a:b", "its nodes must be host:port"),
        ("redis+cluster://a:1/1", "a cluster has only database 0"),
        ("redis+cluster://a:1/?db=3", "a cluster has only database 0"),
        ("redis+cluster://a:1/main", "nothing may follow its nodes except options"),
        ("redis+cluster://a:1/#x", "percent-encoded"),
        ("redis+cluster://a:1/?colour=red", "option 'colour' is unknown"),
        ("rediss+cluster://a:1/?ssl_colour=red", "ssl_colour"),
        ("redis://host?colour=red", "option 'colour' is unknown"),
        ("redis://host?db=1&colour=red", "option 'colour' is unknown"),
        ("redis://host?redis_connect_func=x", "option 'redis_connect_func' is unknown"),
        ("redis://host?sentinel_username=x", "option 'sentinel_username' is unknown"),
        ("redis://host?socket_timeout=soon", "'socket_timeout'"),
        ("redis://host?ssl_ca_certs=/dev/null", "ssl_ca_certs"),
        ("rediss://host?ssl_colour=red", "ssl_colour"),
        ("rediss://host?ssl_cert_reqs=perhaps", "perhaps"),
        ("redis+sentinel://", "host:port"),
        ("redis+sentinel:///main", "host:port"),
        ("redis+sentinel://a:1,/main", "host:port"),
        ("redis+sentinel://a:1 ,b:2/main", "host:port"),
        ("redis+sentinel://a:b/main", "host:port"),
        ("redis+sentinel://a:0/main", "host:port"),
        ("redis+sentinel://a:65536/main", "host:port"),
        ("redis+sentinel://::1:5/main", "host:port"),
        ("redis+sentinel://a:1", "its path must be /service or /service/database"),
        ("redis+sentinel://a:1/", "its path must be /service or /service/database"),
        ("redis+sentinel://a:1//0", "its path must be /service or /service/database"),
        ("redis+sentinel://a:1/main/zero", "its path must be /service or /service/database"),
        ("redis+sentinel://a:1/main/0/1", "its path must be /service or /service/database"),
        ("redis+sentinel://a:1/main#x", "percent-encoded"),
        ("redis+sentinel://a:1/main?ssl_ca_certs=/dev/null", "ssl_ca_certs"),
        ("redis+sentinel://a:1/main?host=b", "option 'host' is unknown"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        open_client(url)
    assert str(error.value).startswith(f"{shown(url)!r} is not a Redis URL: ")
    assert why in str(error.value)
    kind = url.partition(":")[0].rpartition("+")[2]
    example = f"redis+{kind}://" if kind in ("sentinel", "cluster") else "redis://localhost"
    assert f"; for example {example}" in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis+cluster://u:{SECRET}@host:port",
        f"redis+cluster://u:{SECRET}@host:1/1",
        f"redis+cluster://u:a/{SECRET}@host:1",
        f"redis+cluster://u:a#{SECRET}@host:1",
        f"redis+cluster://u:{SECRET}",
        f"redis+cluster://host/{SECRET}",
        f"redis+cluster://host:1/?password={SECRET}&bogus=1",
        f"redis://u:{SECRET}@host:port/0",
        f"redis://u:a/{SECRET}@host/0",
        f"redis://u:a?{SECRET}=1@host/0",
        f"redis://u?{SECRET}=1@host/0",
        f"redis://u:[{SECRET}]@host/0",
        f"redis://u:\N{DOUBLE EXCLAMATION MARK}{SECRET}\uff0f@host/0",
        f"redis://host/x?password={SECRET}",
        f"redis://host/x?password=p@{SECRET}",
        f"redis:u:{SECRET}@host",
        f"{SECRET}@host",
        f"redis+sentinel://u:{SECRET}@host:port/main",
        f"redis+sentinel://u:a/{SECRET}@host:1/main",
        f"redis+sentinel://u:a#{SECRET}@host:1/main",
        f"redis+sentinel://u?{SECRET}=@host:1/main",
        f"redis+sentinel://u:[{SECRET}]@host:port/main",
        f"redis+sentinel://host:1/?sentinel_password={SECRET}",
        f"rediss+sentinel://host:1/?sentinel_password=p@{SECRET}&ssl_password={SECRET}",
        f"redis://:{SECRET}:6379",
        f"redis://user:{SECRET}",
        f"redis://user:{SECRET}/0",
        f"redis://host/{SECRET}",
        f"redis+sentinel://u:{SECRET}",
        f"redis+sentinel://u:{SECRET}/main",
        f"redis://host/0?PASSWORD={SECRET}",
        f"redis://host/0?passwd={SECRET}",
        f"redis://host/0?ssl_pass={SECRET}",
        f"redis://host/0?{SECRET}",
        f"redis://host/0?pass%77ord={SECRET}&bogus=2",
        f"redis://host/0?password=a&{SECRET}=1",
        f"redis://host/0?bogus=1#{SECRET}",
        f"redis+sentinel://host:1/main/0?sentinel_pass={SECRET}",
        f"redis+sentinel://host:1/main/0?sentinel_password=a#{SECRET}&bogus=1",
    ],
)
def test_no_error_repeats_a_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        open_client(url)
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://u:p@host:1/0", "redis://***@host:1/0"),
        ("redis+sentinel://u:p@a:1,b:2/m", "redis+sentinel://***@a:1,b:2/m"),
        ("redis+cluster://u:p@a:1,b:2/", "redis+cluster://***@a:1,b:2/"),
        ("rediss+cluster://a:1/?password=p", "rediss+cluster://a:1/?password=***"),
        (
            "redis+sentinel://a:1/m?sentinel_username=g&sentinel_password=p&db=1",
            "redis+sentinel://a:1/m?sentinel_username=g&sentinel_password=***&db=1",
        ),
        ("unix:///run/redis.sock?password=p", "unix:///run/redis.sock?password=***"),
        ("redis://[::1]:6379/15/?socket_timeout=2.5", "redis://[::1]:6379/15/?socket_timeout=2.5"),
        ("rediss://h?ssl_ca_certs=/a/b.pem", "rediss://h?ssl_ca_certs=/a/b.pem"),
        # A port that is none may be a password, and its host a user.
        ("redis://host:0", "redis://***"),
        ("redis://host:65536", "redis://***"),
        ("redis://host:port/0", "redis://***"),
        ("redis://u:p@host:port/0", "redis://***@***"),
        ("redis+sentinel://a:1 ,b:2/main", "redis+sentinel://***"),
        # A path or an option may be the rest of a password.
        ("redis://host/zero?db=1", "redis://host/***"),
        ("redis+sentinel://a:1/main/zero", "redis+sentinel://a:1/***"),
        ("redis+sentinel://a:1/main#x", "redis+sentinel://***"),
        ("redis://u:a/b@host/0", "redis://***"),
        ("redis://host?colour=red&db=1", "redis://host?colour=***&db=1"),
        ("redis://host?db=1&colour=red", "redis://host?db=1&colour=***"),
        ("redis://host?db=a%20b", "redis://host?db=***"),
        ("redis://host?password=ab#cd", "redis://host?password=***#***"),
        ("redis://host?password=a&b=c", "redis://host?password=***&***"),
        ("redis://host?pass%77ord=a", "redis://host?password=***"),
        ("host:6379", "host:6379"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, expected: str) -> None:
    assert shown(url) == expected
