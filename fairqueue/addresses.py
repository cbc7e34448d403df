"""Read the URL of a Redis: one server, or the primary that sentinels name."""

import os
import re
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

from fairqueue.errors import ConfigurationError

SENTINEL_PORT = 26379
EXAMPLE = "redis://localhost:6379/0"
SENTINEL_EXAMPLE = "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/main/0"

# What may stand after the question mark: all that a text can say. Those of TLS begin with `ssl_`.
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
_DATABASE = re.compile(r"/?|/(\d{1,9})/?")
_SENTINEL_PATH = re.compile(r"/([^/]+)(?:/|/(\d{1,9})/?)?")
# Up to the last "@": a password may hold anything, also what should have been percent-encoded.
_USER_INFO = re.compile(r"^(\w+(?:\+\w+)?://)?.*@", re.DOTALL)
_SECRET_OPTION = re.compile(r"(password=)[^&#]*")


def shown(url: str) -> str:
    """A URL as it may be shown: without user and passwords."""
    return _USER_INFO.sub(r"\1***@", _SECRET_OPTION.sub(r"\1***", url))


def open_client(url: str) -> redis.Redis:
    """A client for a `redis://`, `rediss://`, `unix://` or `redis+sentinel://` URL.

    Opens no connection. Raises ConfigurationError, which never repeats a password.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"{url!r} is no Redis URL: such as {EXAMPLE}")
    make = _sentinel_client if url.startswith(_SENTINEL_SCHEMES) else _plain_client
    try:
        client = make(url)
        _check_files(client.connection_pool.connection_kwargs)
        # Opens nothing, and finds the options that this version of redis-py does not know.
        client.connection_pool.make_connection()
    except (_Unreadable, redis.RedisError, TypeError, ValueError, AttributeError) as error:
        example = SENTINEL_EXAMPLE if "sentinel" in url.partition(":")[0] else EXAMPLE
        raise ConfigurationError(
            f"{shown(url)!r} is no Redis URL ({error}): such as {example}"
        ) from None
    return client


def _check_files(options: dict[str, Any]) -> None:
    """Redis-py would only say that it cannot connect, and not which file it misses."""
    for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        path = options.get(name)
        if path is not None and not os.path.exists(path):
            raise _Unreadable(f"its {name} {path!r} is not there")


class _Unreadable(Exception):
    """Why a text is no URL, in words that do not repeat it."""


def _plain_client(url: str) -> redis.Redis:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = 0  # the reason is not passed on: it may repeat a part of the password
    if port == 0:
        raise _Unreadable("its host or port cannot be read; is the password percent-encoded?")
    if parts.scheme == "unix":
        if not parts.path:
            raise _Unreadable("it has no path")
    elif parts.scheme not in ("redis", "rediss"):
        raise _Unreadable("it begins with none of redis://, rediss://, unix://, redis+sentinel://")
    elif not _DATABASE.fullmatch(parts.path):
        raise _Unreadable("its path is no number of a database")
    _check_options(parts.query, _OPTIONS)
    return redis.Redis.from_url(url)


def _sentinel_client(url: str) -> redis.Redis:
    scheme, _, rest = url.partition("+sentinel://")
    rest, _, query = rest.partition("?")
    hosts, slash, path = rest.partition("/")
    login, _, hosts = hosts.rpartition("@")
    if "#" in rest or "@" in path:
        raise _Unreadable("there is a '#' or '/' in it that should be percent-encoded")
    sentinels = [_host_and_port(each) for each in hosts.split(",")]
    found = _SENTINEL_PATH.fullmatch(slash + path)
    if found is None:
        raise _Unreadable("its path is not the name of a service, and the number of a database")
    _check_options(query, _OPTIONS | _SENTINEL_OPTIONS)
    # redis-py reads the rest, so that an option means the same in all schemes.
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


def _host_and_port(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:@\s]+)(?::(\d{1,5}))?", text)
    port = int(found[2] or SENTINEL_PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        raise _Unreadable("its sentinels are not host:port,host:port,...")
    return unquote(found[1]).strip("[]"), port


def _check_options(query: str, known: frozenset[str]) -> None:
    for name in parse_qs(query, keep_blank_values=True):
        if name not in known and not name.startswith("ssl_"):
            # With an "@" this may be the rest of a password that has a "?" in it.
            which = "" if "@" in query else f" {name[:40]!r}"
            raise _Unreadable(f"its option{which} is unknown")
