"""Read the URL of a Redis: one server, the primary that sentinels name, or a cluster."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

from fairqueue.errors import ConfigurationError, safe_repr
from fairqueue.link.cluster import ClusterAddress

SENTINEL_PORT = 26379
CLUSTER_PORT = 6379
EXAMPLE = "redis://localhost:6379/0"
SENTINEL_EXAMPLE = "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/main/0"
CLUSTER_EXAMPLE = "redis+cluster://10.0.0.1:6379,10.0.0.2:6379/"
EXPECTED = "expected redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"

# The options that may follow the question mark. Those of TLS begin with `ssl_`.
_OPTIONS = frozenset(
    (
        *("db", "username", "password", "client_name", "protocol", "max_connections"),
        *("socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_read_size"),
        *("health_check_interval", "retry_on_timeout", "retry_on_error"),
        *("decode_responses", "encoding", "encoding_errors", "legacy_responses"),
    )
)
_SENTINEL_OPTIONS = frozenset(("sentinel_username", "sentinel_password"))

_SENTINEL_SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
_CLUSTER_SCHEMES = ("redis+cluster://", "rediss+cluster://")
_DATABASE = re.compile(r"/?|/(\d{1,9})/?")
_SENTINEL_PATH = re.compile(r"/([^/]+)(?:/|/(\d{1,9})/?)?")
# The parts of a URL that can be shown. Anything else may be a password, or a part of one that was
# not percent-encoded.
_SCHEME = re.compile(r"([A-Za-z]{1,10}(?:\+[A-Za-z]{1,10})?://)(.*)", re.DOTALL)
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(?::([1-9]\d{0,4}))?")
_PLAIN_PATHS = {
    "unix": re.compile(r"(?:/[A-Za-z0-9_.+-]{1,64}){0,16}/?"),
    "sentinel": re.compile(r"/?|/[A-Za-z0-9_.-]{1,64}(?:/\d{0,9}/?)?"),
    "cluster": re.compile(r"/?|/\d{1,9}/?"),
}
_PLAIN_NAME = re.compile(r"[A-Za-z_]{1,40}")
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:/+-]{0,200}")
_HARMLESS = (_OPTIONS - {"password"}) | {
    *("sentinel_username", "ssl_cert_reqs", "ssl_check_hostname", "ssl_min_version"),
    *("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"),
}


def shown(url: str) -> str:
    """A URL for messages: parts that may contain a password are replaced by `***`."""
    found = _SCHEME.fullmatch(url)
    if found is None:
        return url if not url or (":" in url and _is_place(url)) else "***"
    scheme, rest = found.groups()
    place, mark, query = rest.partition("?")
    authority, slash, path = place.partition("/")
    if "@" in path + query or "#" in place:  # the host may be missing, and all of it a password
        return f"{scheme}***"
    _, at, hosts = authority.rpartition("@")
    text = scheme + ("***@" if at else "")
    if hosts and not all(map(_is_place, hosts.split(","))):
        return f"{text}***"
    kind = scheme[:-3].rpartition("+")[2].lower()
    plain = _PLAIN_PATHS.get(kind, _DATABASE)
    if not plain.fullmatch(slash + path):
        return f"{text}{hosts}/***"
    query, fragment, _ = query.partition("#")
    options = "&".join(_shown_options(query))
    return text + hosts + slash + path + mark + options + ("#***" if fragment else "")


def _is_place(text: str) -> bool:
    """Whether a text looks like a host, or a host and a port."""
    found = _PLACE.fullmatch(text)
    return found is not None and int(found[1] or 1) < 65_536


def _shown_options(query: str) -> Iterator[str]:
    """The options for messages: their names, and the values of harmless ones."""
    is_certain = True
    for option in query.split("&") if query else ():
        raw, equals, value = option.partition("=")
        name = unquote(raw)
        if name in _HARMLESS and _PLAIN_VALUE.fullmatch(value):
            yield f"{name}{equals}{value}"
            continue
        is_named = is_certain and equals and _PLAIN_NAME.fullmatch(name)
        yield f"{name}=***" if is_named or name in _OPTIONS | _SENTINEL_OPTIONS else "***"
        is_certain = False  # this may be a password with an "&" in it, which continues here


def open_client(url: str) -> redis.Redis | ClusterAddress:
    """A client for a `redis://`, `rediss://`, `unix://`, `+sentinel://` or `+cluster://` URL.

    Opens no connection. Raises ConfigurationError, which never repeats a password.
    """
    if not isinstance(url, str):
        raise ConfigurationError(
            f"{safe_repr(url)} is not a Redis URL: expected a string such as {EXAMPLE}"
        )
    make: Callable[[str], redis.Redis | ClusterAddress] = _plain_client
    if url.startswith(_SENTINEL_SCHEMES):
        make = _sentinel_client
    elif url.startswith(_CLUSTER_SCHEMES):
        make = _cluster
    try:
        client = make(url)
        pool = client.pool if isinstance(client, ClusterAddress) else client.connection_pool
        _check_files(pool.connection_kwargs)
        # Opens no connection, and finds options that this version of redis-py does not know.
        pool.make_connection()
    except (_Unreadable, redis.RedisError, TypeError, ValueError, AttributeError) as error:
        kind = url.partition(":")[0].rpartition("+")[2]
        example = {"sentinel": SENTINEL_EXAMPLE, "cluster": CLUSTER_EXAMPLE}.get(kind, EXAMPLE)
        raise ConfigurationError(
            f"{shown(url)!r} is not a Redis URL: {error}; for example {example}"
        ) from None
    return client


def _check_files(options: dict[str, Any]) -> None:
    """Check that the files of TLS exist: redis-py would only say that it cannot connect."""
    for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        path = options.get(name)
        if path is not None and not os.path.exists(path):
            raise _Unreadable(f"its {name} {path!r} does not exist")


class _Unreadable(Exception):
    """Why a URL is rejected, in words that do not repeat it."""


def _plain_client(url: str) -> redis.Redis:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = 0  # the reason is not shown: it may repeat a part of the password
    if port == 0:
        raise _Unreadable("its host or port is not valid; is the password percent-encoded?")
    if parts.scheme == "unix":
        if not parts.path:
            raise _Unreadable("it has no path")
    elif parts.scheme not in ("redis", "rediss"):
        raise _Unreadable(EXPECTED)
    elif not _DATABASE.fullmatch(parts.path):
        raise _Unreadable("its path must be a database number")
    _check_options(parts.query, _OPTIONS)
    return redis.Redis.from_url(url)


def _sentinel_client(url: str) -> redis.Redis:
    scheme, _, rest = url.partition("+sentinel://")
    rest, _, query = rest.partition("?")
    hosts, slash, path = rest.partition("/")
    login, _, hosts = hosts.rpartition("@")
    if "#" in rest or "@" in path:
        raise _Unreadable("a '#' or '/' in it must be percent-encoded")
    sentinels = [_host_and_port(each, "sentinels", SENTINEL_PORT) for each in hosts.split(",")]
    found = _SENTINEL_PATH.fullmatch(slash + path)
    if found is None:
        raise _Unreadable("its path must be /service or /service/database")
    _check_options(query, _OPTIONS | _SENTINEL_OPTIONS)
    # redis-py parses the rest, so that an option means the same in all schemes.
    options: dict[str, Any] = parse_url(f"redis://unused/{found[2] or 0}?{query}")
    del options["host"]
    user, _, password = map(unquote, login.partition(":"))
    options |= {"username": user} if user else {}
    options |= {"password": password} if password else {}
    ours = {"username": "sentinel_username", "password": "sentinel_password"}
    theirs = {name: options.pop(named) for name, named in ours.items() if named in options}
    if scheme == "rediss":
        options["ssl"] = True
        theirs |= {name: value for name, value in options.items() if name.startswith("ssl")}
    client: redis.Redis = Sentinel(sentinels, sentinel_kwargs=theirs, **options).master_for(
        unquote(found[1])
    )
    return client


def _cluster(url: str) -> ClusterAddress:
    scheme, _, rest = url.partition("+cluster://")
    rest, _, query = rest.partition("?")
    hosts, slash, path = rest.partition("/")
    login, at, hosts = hosts.rpartition("@")
    if "#" in rest or "@" in path:
        raise _Unreadable("a '#' or '/' in it must be percent-encoded")
    nodes = tuple(_host_and_port(each, "nodes", CLUSTER_PORT) for each in hosts.split(","))
    if not _DATABASE.fullmatch(slash + path):
        raise _Unreadable("nothing may follow its nodes except options")
    database = parse_qs(query).get("db", [path.rstrip("/") or "0"])[-1]
    if database.strip("0"):
        raise _Unreadable("a cluster has only database 0")
    _check_options(query, _OPTIONS)
    # redis-py parses the rest, so that an option means the same in all schemes.
    login = quote(login, safe=":%")
    pool = redis.ConnectionPool.from_url(f"{scheme}://{login}{at}unused/0?{query}")
    return ClusterAddress(nodes=nodes, pool=pool)


def _host_and_port(text: str, what: str, usual: int) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:@\s]+)(?::(\d{1,5}))?", text)
    port = int(found[2] or usual) if found else 0
    if found is None or not 0 < port < 65_536:
        raise _Unreadable(f"its {what} must be host:port,host:port,...")
    return unquote(found[1]).strip("[]"), port


def _check_options(query: str, known: frozenset[str]) -> None:
    for name in parse_qs(query, keep_blank_values=True):
        if name not in known and not name.startswith("ssl_"):
            # With an "@" this may be the rest of a password that contains a "?".
            names = (
                [] if "@" in query else [each.partition("=")[0] for each in _shown_options(query)]
            )
            which = f" {name!r}" if name in names else ""
            raise _Unreadable(f"its option{which} is unknown")
