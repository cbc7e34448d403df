"""Nothing that a user can say makes the library connect to the inside: a corpus, end to end.

Real listeners stand on the inside, and an audit hook sees each connection that this process makes,
whoever makes it. The public Internet is played by one loopback address that the worker may call.
"""

import asyncio
import ipaddress
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from helpers.rest import make_app
from helpers.tasks import make_task
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue import Worker
from fairqueue.access.credentials import AccessStore
from fairqueue.alerts import Alert, AlertNotSent, WebhookRecipient
from fairqueue.http_tasks.checks import Outgoing
from fairqueue.http_tasks.http import HttpTasks
from fairqueue.link.operation import Operation, operation
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.web.api.endpoint import PREFIX

STRICT = ssl.create_default_context()  # one for all: to make it takes longer than most tests
PUBLIC = "127.99.0.1"  # stands for the Internet: the one address that may be called
INSIDE = ("127.0.0.1", "127.0.0.2", "127.255.255.254", "::1")

# --- the corpus -----------------------------------------------------------------------------------
# {port} is one at which somebody listens on every address of INSIDE.

# Written in a URL as they are. Those of IPv6 stand in brackets there.
ADDRESSES = {
    "loopback": ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1"],
    "unspecified": ["0.0.0.0", "0.0.0.1", "0.255.255.255", "::"],
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.254", "192.168.0.1", "fc00::1", "fd00::1"],
    "shared": ["100.64.0.1", "100.127.255.254"],
    "link-local": ["169.254.0.1", "fe80::1", "fe80::5efe:7f00:1", "febf::1"],
    "site-local": ["fec0::1", "feff::1"],
    "protocols": ["192.0.0.1", "192.0.0.170", "192.88.99.1", "2001:10::1", "2001:20::1"],
    "benchmarking": ["198.18.0.1", "198.19.255.254", "2001:2::1"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"],
    "multicast": ["224.0.0.1", "239.255.255.250", "ff02::1", "ff05::1:3", "ff0e::1"],
    "broadcast": ["255.255.255.255", "240.0.0.1"],
    "mapped": ["::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"],
    "compatible": ["::127.0.0.1", "::7f00:1", "::10.0.0.1"],
    "translated": ["::ffff:0:127.0.0.1", "::ffff:0:7f00:1"],
    "6to4": ["2002:7f00:1::", "2002:7f00:1::1", "2002:a00:1::1", "2002:a9fe:a9fe::1"],
    "Teredo": ["2001::1", "2001:0:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe"],
    "NAT64": ["64:ff9b::7f00:1", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe"],
    "NAT64, local use": ["64:ff9b:1::7f00:1", "64:ff9b:1:ffff::1", "64:ff9b:1:7f00:0:100::"],
    "ISATAP": ["2606:4700::5efe:7f00:1", "2606:4700::200:5efe:a00:1", "2a00::5efe:127.0.0.1"],
    "not given out": ["100::1", "4000::1", "5f00::1", "8000::1"],
    "metadata": [
        "169.254.169.254",  # AWS, Google, Azure, DigitalOcean and others
        "169.254.170.2",  # the tasks of ECS
        "169.254.170.23",  # the pods of EKS
        "169.254.0.23",  # Tencent
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
        "168.63.129.16",  # the host of a machine of Azure, in a range of public addresses
        "fd00:ec2::254",  # AWS
        "fd00:ec2::23",
        "fd20:ce::254",  # Google
    ],
}

# Hosts that somebody reads as an address of the inside, or as another host than we do.
HOSTS = {
    "short": ["127.1", "127.0.1", "127.65536", "0", "127", "10.1"],
    "decimal": ["2130706433", "4294967295", "2852039166", "3232235521", "0000002130706433"],
    "octal": ["0177.0.0.1", "017700000001", "0177.1", "127.0.0.01", "00000177.0.0.1"],
    "hexadecimal": ["0x7f000001", "0x7f.0.0.1", "0x7f.1", "0X7F.1", "0x7F.0x0.0x0.0x1", "0x"],
    "mixed": ["0x7f.0.01", "0177.0x0.0.1", "127.0x1", "0xa9.0376.43518", "0251.0xfe.169.254"],
    "overflow": [
        "127.0.0.257",
        "4294967296",
        "6425673729",
        "383.0.0.1",
        "127.0.0.1.0",
        "1.2.3.4.5",
        "0x17f000001",
        "18446744075840258049",
        "9" * 400,
    ],
    "other digits": ["１２７.0.0.1", "①②⑦.0.0.1", "١٢٧.0.0.1", "𝟏𝟐𝟕.𝟎.𝟎.𝟏", "⑯⑨.254.169.254"],
    "other dots": ["127。0。0。1", "127．0．0．1", "127｡0｡0｡1", "localhost。", "127․0․0․1"],
    "escapes": ["%31%32%37.0.0.1", "127%2e0%2e0%2e1", "127.0.0.1%00", "%6cocalhost", "%5b::1%5d"],
    "twice escaped": ["%2531%2532%2537.0.0.1", "127%252e0.0.1"],
    "trailing dots": ["127.0.0.1.", "127.0.0.1..", "localhost.", "localhost..", ".127.0.0.1", "."],
    "user": [
        "user@127.0.0.1",
        "user:word@127.0.0.1",
        "@127.0.0.1",
        ":@127.0.0.1",
        "public.example@127.0.0.1",
        "public.example:80@127.0.0.1",
        "a@public.example@127.0.0.1",
        "127.0.0.1@public.example",
        "public.example%40127.0.0.1",
        "user%40public.example@127.0.0.1",
    ],
    "backslashes": [
        "public.example\\@127.0.0.1",
        "127.0.0.1\\@public.example",
        "127.0.0.1\\.public.example",
        "\\\\127.0.0.1",
        "\\127.0.0.1",
    ],
    "white space": [
        " 127.0.0.1",
        "127.0.0.1 ",
        "127.0.0.1\t",
        "127.\n0.0.1",
        "\r127.0.0.1",
        "127.0.0.1 public.example",
        "127.0.0.1\r\nHost: public.example",
        "127.0.0.1\u00a0",
        "127.0.0\u200b.1",
        "local\u00adhost",
        "\ufefflocalhost",
    ],
    "NUL": ["127.0.0.1\0", "127.0.0.1\0.public.example", "public.example\0@127.0.0.1"],
    "fragments": [
        "public.example#@127.0.0.1",
        "127.0.0.1#@public.example",
        "public.example?@127.0.0.1",
        "127.0.0.1?.public.example",
        "public.example;@127.0.0.1",
        "public.example/@127.0.0.1",
        "#127.0.0.1",
        "?127.0.0.1",
    ],
    "lists": ["127.0.0.1,public.example", "public.example,127.0.0.1", "{127.0.0.1}", "127.0.0.[1]"],
    "zones": [
        "[fe80::1%25lo]",
        "[fe80::1%lo]",
        "[::1%25lo]",
        "[::1%lo]",
        "[::1%251]",
        "[::ffff:127.0.0.1%251]",
        "[fe80::1%25@public.example]",
    ],
    "spellings of IPv6": [
        "[0:0:0:0:0:0:0:1]",
        "[0000:0000:0000:0000:0000:0000:0000:0001]",
        "[::0001]",
        "[::FFFF:127.0.0.1]",
        "[::ffff:0x7f.1]",
        "[::ffff:0177.0.0.1]",
        "[::ffff:127.1]",
        "[0:0::ffff:7f00:1]",
        "[::1",
        "::1]",
        "::1",
        "[[::1]]",
        "[127.0.0.1]",
        "[v1.127.0.0.1]",
        "[]",
        "[::1].public.example",
        "[::1]@public.example",
        "[1:2:3:4:5:6:7:8:9]",
    ],
    "homographs": [
        "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ",
        "ｌｏｃａｌｈｏｓｔ",
        "LOCALHOST",
        "locaLhost",
        "lоcalhost",  # with a Cyrillic o
        "localhoſt",
        "ʟocalhost",
        "xn--localhost-",
        "xn--",
        "xn--a",
        "ß.example",
        "faß.localhost",
    ],
    "names": [
        "localhost",
        "localhost.localdomain",
        "ip6-localhost",
        "ip6-loopback",
        "a.localhost",
        "broadcasthost",
        "metadata",
        "metadata.google.internal",
        "metadata.goog",
        "instance-data",
        "instance-data.ec2.internal",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "host.docker.internal",
        "gateway.docker.internal",
        "redis",
        "printer.local",
        "127.0.0.1.nip.example",
        "7f000001.rebind.example",
        "_dns.example",
        "-",
        "a..b",
        "a" * 64 + ".example",
        "a." * 127 + "example",
    ],
}

# Whole URLs: {inside} is an address with a port where somebody listens.
URLS = [
    "//{inside}/",
    "http:{inside}/",
    "http:/{inside}/",
    "http:///{inside}/",
    "http:////{inside}/",
    "http:\\\\{inside}\\",
    "http:/\\{inside}/",
    "https:{inside}",
    "://{inside}/",
    ":{inside}",
    "{inside}",
    "{inside}/",
    "http://",
    "https://",
    "http://:{port}/",
    "http://?{inside}",
    "HTTP://{inside}/",
    "hTTps://{inside}/",
    " http://{inside}/",
    "\thttp://{inside}/",
    "\nhttp://{inside}/",
    "\0http://{inside}/",
    "ht\ntp://{inside}/",
    "http://\n{inside}/",
    "http ://{inside}/",
    "http%3a//{inside}/",
    "ftp://{inside}/",
    "file:///etc/passwd",
    "file://{inside}/etc/passwd",
    "gopher://{inside}/_PING",
    "dict://{inside}/INFO",
    "ldap://{inside}/",
    "redis://{inside}/0",
    "ws://{inside}/",
    "wss://{inside}/",
    "tftp://{inside}/x",
    "jar:http://{inside}!/",
    "data:text/plain,http://{inside}/",
    "javascript:http://{inside}/",
    "view-source:http://{inside}/",
    "url:http://{inside}/",
    "http+unix://%2Ftmp%2Fredis.sock/",
    "unix:///tmp/redis.sock",
    "http://unix:/tmp/redis.sock:/",
    "https://{inside}:",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:00080/",
    "http://127.0.0.1:65536/",
    "http://127.0.0.1:99999999999999999999/",
    "http://127.0.0.1:-1/",
    "http://127.0.0.1:+{port}/",
    "http://127.0.0.1: {port}/",
    "http://127.0.0.1:0x50/",
    "http://127.0.0.1:８０/",
    "http://127.0.0.1:{port}:{port}/",
    "http://127.0.0.1:{port}@public.example/",
    "http://public.example:{port}@127.0.0.1:{port}/",
    "http://[::1]:{port}",
    "http://[::1]{port}/",
    "http://127.0.0.1:{port}/../../",
    "http://127.0.0.1:{port}//public.example/",
    "http://127.0.0.1:{port}?http://public.example/",
    "http://127.0.0.1:{port}#http://public.example/",
    "http://127.0.0.1:{port};public.example/",
    "http://127.0.0.1:{port}&public.example/",
]

# What a name server says, each time that it is asked; the last answer stands.
INTERNAL_ANSWERS: dict[str, list[str]] = {
    "mixed-first.example": ["127.0.0.1", PUBLIC],
    "mixed-last.example": [PUBLIC, "127.0.0.1"],
    "mixed-v6.example": [PUBLIC, "::1"],
    "mixed-mapped.example": [PUBLIC, "::ffff:127.0.0.1"],
    "mixed-metadata.example": [PUBLIC, "169.254.169.254"],
    "mixed-host.example": [PUBLIC, "168.63.129.16"],
    "last-of-many.example": [PUBLIC] * 40 + ["127.0.0.1"],
    "zone.example": ["fe80::1%lo"],
    "zone-loopback.example": ["::1%lo"],
    "isatap.example": ["2606:4700::5efe:7f00:1"],
}
# Blocked, or for a form that is none, just failed: in any case not connected to.
BROKEN_ANSWERS: dict[str, list[str]] = {
    "number.example": ["2130706433"],
    "short.example": ["127.1"],
    "octal.example": ["0177.0.0.1"],
    "name.example": ["localhost"],
    "socket.example": ["/tmp/redis.sock"],
    "with-port.example": ["127.0.0.1:80"],
    "brackets.example": ["[::1]"],
    "empty.example": [""],
    "none.example": [],
    "good-and-broken.example": [PUBLIC, "localhost"],
}

# What the public server answers, to get whoever asks to go somewhere else: status, headers, body.
TARGETS = (
    "http://127.0.0.1:{port}/",
    "//127.0.0.1:{port}/",
    "http://[::1]:{port}/",
    "http://2130706433:{port}/",
    "http://localhost:{port}/",
    "http://mixed-last.example:{port}/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:{port}/_PING",
    "/elsewhere",
)


def answers(port: int) -> Iterator[tuple[int, dict[str, str], str]]:
    """Each kind of redirect to each target, and what some clients take for one."""
    for target in (each.format(port=port) for each in TARGETS):
        for status in (300, 301, 302, 303, 304, 305, 306, 307, 308, 399):
            yield status, {"Location": target}, ""
    inside = f"http://127.0.0.1:{port}/"
    for status in (200, 201, 202, 404, 503):
        yield status, {"Refresh": f"0; url={inside}"}, ""
        yield status, {"Location": inside, "Content-Location": inside}, ""
    yield 200, {"Link": f"<{inside}>; rel=preload"}, ""
    yield 200, {"Alt-Svc": f'h2="127.0.0.1:{port}"; ma=60'}, ""
    yield 200, {"Content-Type": "text/html"}, f'<meta http-equiv=refresh content="0;url={inside}">'
    yield 200, {"Content-Type": "application/xml"}, f'<!DOCTYPE x SYSTEM "{inside}"><x/>'
    yield 200, {"Set-Cookie": "a=b; Domain=127.0.0.1"}, ""
    yield 401, {"WWW-Authenticate": f'Bearer realm="{inside}"'}, ""
    yield 407, {"Proxy-Authenticate": "Basic"}, ""
    yield 421, {"Location": inside}, ""
    yield 426, {"Upgrade": "h2c"}, ""


# --- the inside, the outside, and who watches -----------------------------------------------------

_watching: list[list[tuple[str, Any]]] = []


def _stays_here(event: str, where: Any) -> bool:
    """Whether it is no more than this machine; what a broken guard lets through goes nowhere."""
    if event == "socket.getaddrinfo":
        return where in (None, "localhost") or _is_address(where)  # which asks nobody
    if not isinstance(where, tuple):
        return True  # the path of a socket
    return _is_address(where[0]) and ipaddress.ip_address(where[0]).is_loopback


@cache
def _install() -> None:
    """A hook cannot be taken away again: it is there from the first test on, and costs little."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _watching and event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
            found = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
            for notes in _watching:
                notes.append((event, found))
            if not _stays_here(event, found):
                raise PermissionError(f"{event} {found!r}: no test goes out of this machine")

    sys.addaudithook(hook)


@dataclass(kw_only=True)
class Inside:
    """Listeners that nobody may reach, all at one port, and a record of all that was tried."""

    port: int
    listeners: dict[str, socket.socket]
    server: Any  # the address of Redis
    tried: list[tuple[str, Any]] = field(default_factory=list)

    def connections(self) -> list[str]:
        """The addresses at which somebody has connected."""
        found = []
        for address, listener in self.listeners.items():
            with suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append(address)
        return found

    def destinations(self) -> list[Any]:
        """Where this process has connected to, but for Redis."""
        return [where for event, where in self.tried if event != "socket.getaddrinfo"]

    def names(self) -> list[Any]:
        """What was looked up that is no address."""
        names = [where for event, where in self.tried if event == "socket.getaddrinfo"]
        return [name for name in names if not _is_address(name)]

    def was_left_alone(self, public: int = 0) -> None:
        """Nobody came, and nobody tried; `public`: how often the public server was called."""
        assert self.connections() == []
        outside = [where for where in self.destinations() if not self._is_redis(where)]
        assert [where for where in outside if where[0] != PUBLIC] == []
        assert len(outside) == public
        assert [name for name in self.names() if not self._is_redis((name,))] == []

    def _is_redis(self, where: Any) -> bool:
        host = self.server[0] if isinstance(self.server, tuple) else self.server
        return where == self.server or (not isinstance(where, str) and where[0] == host)


def _is_address(name: Any) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _listen(port: int) -> dict[str, socket.socket]:
    """A listener on each address of the inside that this machine has, at the same port."""
    listeners: dict[str, socket.socket] = {}
    try:
        for address in INSIDE:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue
            listener = socket.create_server((address, port), family=family, backlog=100)
            listener.setblocking(False)
            listeners[address] = listener
            port = listener.getsockname()[1]
    except OSError:
        for listener in listeners.values():
            listener.close()
        raise
    return listeners


def _listeners() -> dict[str, socket.socket]:
    for _ in range(20):  # a port that is free on one address may be taken on another
        with suppress(OSError):
            return _listen(0)
    pytest.skip("this machine has no loopback addresses but one")


@pytest.fixture
def inside(redis_url: str) -> Iterator[Inside]:
    _install()
    parts = urlsplit(redis_url)
    server = parts.path if parts.scheme == "unix" else (parts.hostname, parts.port or 6379)
    listeners = _listeners()
    port = next(iter(listeners.values())).getsockname()[1]
    inside = Inside(port=port, listeners=listeners, server=server)
    _watching.append(inside.tried)
    yield inside
    _watching.remove(inside.tried)
    for listener in listeners.values():
        listener.close()


class _Call(BaseHTTPRequestHandler):
    server: "Public"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, body = self.server.answer(self)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


class Public(ThreadingHTTPServer):
    """The server that plays the Internet; it answers the path /7 with the seventh answer."""

    daemon_threads = True
    request_queue_size = 200

    def __init__(self, answers: Iterable[tuple[int, dict[str, str], str]]) -> None:
        super().__init__((PUBLIC, 0), _Call)
        self.answers = list(answers)
        self.paths: list[str] = []
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, call: _Call) -> tuple[int, dict[str, str], str]:
        self.paths.append(call.path)
        number = call.path.removeprefix("/")
        return self.answers[int(number)] if number.isdecimal() else (200, {}, "hello")


@pytest.fixture
def public(inside: Inside) -> Iterator[Public]:
    public = Public(answers(inside.port))
    yield public
    public.shutdown()
    public.server_close()


def corpus(port: int) -> list[str]:
    """All URLs: each leads inside for somebody who reads it in some way."""
    hosts = [f"[{a}]" if ":" in a else a for each in ADDRESSES.values() for a in each]
    hosts += [host for each in HOSTS.values() for host in each]
    hosts += [*INTERNAL_ANSWERS, *BROKEN_ANSWERS]
    urls = [f"http://{host}:{port}/hook" for host in hosts]
    inside = f"127.0.0.1:{port}"
    urls += [url.replace("{inside}", inside).replace("{port}", str(port)) for url in URLS]
    return urls


def with_tls(urls: Iterable[str]) -> list[str]:
    """The same hosts at the port that is usual for https."""
    hosts = [url.removeprefix("http://").partition(":")[0] for url in urls]
    return [f"https://{host}/" for host in dict.fromkeys(hosts)]


def name_server(host: str) -> list[str]:
    """The worst of all resolvers: whatever it does not know is this machine."""
    return (INTERNAL_ANSWERS | BROKEN_ANSWERS).get(host, ["127.0.0.1"])


def make_worker(
    world: World,
    resolver: Callable[[str], Iterable[str]] = name_server,
    allow: Iterable[str] = (PUBLIC,),
) -> Worker:
    """A worker whose HTTP tasks may call the public server and no other."""
    worker = Worker(world.queue, concurrency=250, registry=CollectorRegistry())
    tasks = HttpTasks(
        allow_private=allow, allow_http=True, resolver=resolver, timeout=5, ssl_context=STRICT
    )
    tasks.register(worker, retries=0)
    return worker


def ended(world: World, task_ids: Iterable[str]) -> dict[str, str]:
    """Tasks that ended in any other way than by being refused: id -> what became of them."""
    found = {}
    for task_id in task_ids:
        info = world.info(task_id)
        if info.state != "buried":
            found[task_id] = f"{info.state}: {info.task and info.task.payload} {info.result}"
    return found


# --- that the watchers see ------------------------------------------------------------------------


def test_a_connection_to_the_inside_would_be_seen(world: World, inside: Inside) -> None:
    """What proves the other tests: the same way, with a worker that may call all of the inside."""
    worker = make_worker(world, allow=["127.0.0.0/8", "::1"])
    for number, address in enumerate(inside.listeners):
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{inside.port}/"
        world.queue.push(
            make_task(task_id=f"t{number}", name="http", payload={"url": url, "timeout": 0.1})
        )
    worker.run_until_empty()
    assert inside.connections() == list(inside.listeners)
    with pytest.raises(AssertionError):
        inside.was_left_alone()
    assert {where[0] for where in inside.destinations() if where != inside.server} == set(
        inside.listeners
    )


def test_a_name_that_is_looked_up_by_the_way_would_be_seen(inside: Inside) -> None:
    socket.getaddrinfo("localhost", 80)
    assert inside.names() == ["localhost"]


# --- the corpus, by each way in -------------------------------------------------------------------


def test_no_url_that_is_pushed_leads_inside(world: World, inside: Inside) -> None:
    urls = corpus(inside.port)
    urls += with_tls(urls)
    payloads = [{"url": url, "timeout": 1} for url in urls]
    ids = world.queue.push_many(make_task(name="http", payload=payload) for payload in payloads)
    assert make_worker(world).run_until_empty() == len(ids)
    inside.was_left_alone()
    assert ended(world, ids) == {}


def test_an_answer_that_is_not_an_address_is_reported(world: World, inside: Inside) -> None:
    payload = {"url": "http://socket.example/"}
    task_id = world.queue.push(make_task(name="http", payload=payload))
    make_worker(world).run_until_empty()
    inside.was_left_alone()
    info = world.info(task_id)
    assert "http://socket.example: the resolver returned an invalid address" in str(info.error)


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes tasks does not look at them: an older version, or another program."""

    @operation
    def look_away(self: Outgoing, name: str, payload: object) -> Operation[None]:
        yield from ()

    monkeypatch.setattr(Outgoing, "check", look_away)


@pytest.mark.usefixtures("unguarded")
def test_no_url_that_a_schedule_fires_leads_inside(world: World, inside: Inside) -> None:
    urls = corpus(inside.port)
    world.scheduler.add_schedules(
        {"schedule_id": f"s{n}", "user_id": "eve", "every": 60, "name": "http"}
        | {"payload": {"url": url}}
        for n, url in enumerate(urls)
    )
    world.advance(60)
    while world.tick().fired:
        pass
    assert make_worker(world).run_until_empty() == len(urls)
    inside.was_left_alone()
    assert world.queue.inspect().dead == len(urls)


Request = tuple[str, str, dict[str, Any]]


def send_all(world: World, requests: Iterable[Request]) -> list[httpx.Response]:
    """Send many requests to the REST API as an admin, one after the other."""
    app = make_app(world.queue)
    secret = AccessStore(world.queue.link).create_key("eve", "admin", by="test").secret

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        headers = {"Authorization": f"Bearer {secret}"}
        base = f"http://test{PREFIX}"
        async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client:
            return [
                await client.request(method, base + path, json=body)
                for method, path, body in requests
            ]

    return asyncio.run(send())


def by_task(urls: list[str]) -> list[Request]:
    return [("POST", "/tasks", {"user_id": "eve", "name": "http"} | wanted(url)) for url in urls]


def by_trigger(urls: list[str]) -> list[Request]:
    return [
        ("POST", "/scheduler/jobs", job("s", "http://public.example/")),
        *(("POST", "/scheduler/jobs/s/run", wanted(url)) for url in urls),
    ]


def by_edit(urls: list[str]) -> list[Request]:
    edits = (
        [("PATCH", "/scheduler/jobs/s", wanted(url)), ("POST", "/scheduler/jobs/s/run", {})]
        for url in urls
    )
    first: Request = ("POST", "/scheduler/jobs", job("s", "http://public.example/"))
    return [first, *(request for edit in edits for request in edit)]


def by_import(urls: list[str]) -> list[Request]:
    documents = [job(f"s{n}", url) for n, url in enumerate(urls)]
    change = {"documents": documents, "dry_run": False}
    runs = {"action": "trigger", "user_id": "eve", "dry_run": False}
    return [("POST", "/scheduler/jobs/import", change), ("POST", "/scheduler/jobs/bulk", runs)]


def wanted(url: str) -> dict[str, Any]:
    return {"payload": {"url": url}}


def job(schedule_id: str, url: str) -> dict[str, Any]:
    return {"schedule_id": schedule_id, "user_id": "eve", "name": "http", "every": 60} | wanted(url)


# A request for each URL takes its time: where they come one by one, only each nth is sent.
@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize(
    ("way", "nth"), [(by_task, 2), (by_trigger, 3), (by_edit, 5), (by_import, 1)]
)
def test_no_url_that_comes_by_the_rest_api_leads_inside(
    world: World, inside: Inside, way: Callable[[list[str]], list[Request]], nth: int
) -> None:
    urls = corpus(inside.port)[::nth]
    responses = send_all(world, way(urls))
    assert {response.status_code for response in responses} <= {200, 201}
    assert make_worker(world).run_until_empty() == len(urls)
    inside.was_left_alone()
    assert world.queue.inspect().dead == len(urls)


def test_a_url_with_a_private_address_is_refused(world: World, inside: Inside) -> None:
    urls = [
        f"https://{'[' + each + ']' if ':' in each else each}:{inside.port}/"
        for addresses in ADDRESSES.values()
        for each in addresses
    ]
    responses = send_all(world, by_task(urls))
    assert [response.status_code for response in responses] == [422] * len(urls)
    inside.was_left_alone()
    assert world.queue.size() == 0


def test_no_url_from_a_spoilt_record_leads_inside(world: World, inside: Inside) -> None:
    """What stands in Redis may be by somebody else: the worker trusts none of it."""
    urls = [f"http://127.0.0.1:{inside.port}/", f"http://2130706433:{inside.port}/"]
    odd: list[Any] = [None, 7, [urls[0]], {"url": urls[0]}, urls[0].encode().hex(), "\ud800"]
    ids = world.queue.push_many(make_task(name="http") for _ in (*urls, *odd))
    for task_id, url in zip(ids, (*urls, *odd), strict=True):
        document = {"user": "alice", "name": "http", "priority": 3, "payload": {"url": url}}
        world.redis.hset(world.keys["tasks"], task_id, json.dumps(document))
    assert make_worker(world).run_until_empty() == len(ids)
    inside.was_left_alone()
    assert ended(world, ids) == {}


# --- names that change their meaning --------------------------------------------------------------


@dataclass
class Rebinding:
    """A name server that gives one answer after the other, and counts how often it was asked."""

    answers: list[Iterable[str]]
    asked: int = 0

    def __call__(self, host: str) -> Iterable[str]:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


REBINDINGS: dict[str, list[list[str]]] = {
    "to loopback": [[PUBLIC], ["127.0.0.1"]],
    "to loopback of IPv6": [[PUBLIC], ["::1"]],
    "to a mapped address": [[PUBLIC], ["::ffff:127.0.0.1"]],
    "to metadata": [[PUBLIC], ["169.254.169.254"]],
    "to nowhere": [[PUBLIC], ["0.0.0.0"]],
    "to a mixture": [[PUBLIC], [PUBLIC, "127.0.0.1"]],
}


@pytest.mark.parametrize("kind", REBINDINGS)
def test_a_name_that_turns_inside_after_it_was_checked_is_called_where_it_was(
    world: World, inside: Inside, public: Public, kind: str
) -> None:
    resolver = Rebinding([*REBINDINGS[kind]])
    worker = make_worker(world, resolver)
    url = f"http://rebind.example:{public.port}/once"
    ids = [world.queue.push(make_task(name="http", payload={"url": url})) for _ in range(2)]
    assert worker.run_until_empty() == 2
    inside.was_left_alone(public=1)
    assert (resolver.asked, public.paths) == (2, ["/once"])  # each task looks once
    assert sorted(info.state for i in ids if (info := world.queue.get(i))) == ["buried", "finished"]


def test_a_name_turned_private_is_not_called(world: World, inside: Inside, public: Public) -> None:
    def changing(host: str) -> Iterator[str]:
        yield PUBLIC
        yield "127.0.0.1"

    world.queue.push(
        make_task(name="http", payload={"url": f"http://rebind.example:{public.port}/"})
    )
    assert make_worker(world, changing).run_until_empty() == 1
    inside.was_left_alone()
    assert public.paths == []


def test_a_dead_public_address_is_not_looked_up_again(world: World, inside: Inside) -> None:
    """Nobody listens there at this port; a second look would find the inside."""
    resolver = Rebinding([[PUBLIC, PUBLIC], ["127.0.0.1"]])
    url = f"http://rebind.example:{inside.port}/"
    world.queue.push(make_task(name="http", payload={"url": url, "timeout": 1}))
    assert make_worker(world, resolver).run_until_empty() == 1
    inside.was_left_alone(public=2)
    assert resolver.asked == 1


# --- answers that lead elsewhere ------------------------------------------------------------------


def test_no_answer_leads_anywhere_else(world: World, inside: Inside, public: Public) -> None:
    count = len(public.answers)
    base = f"http://public.example:{public.port}"
    worker = make_worker(world, lambda host: [PUBLIC])
    world.queue.push_many(
        make_task(name="http", payload={"url": f"{base}/{n}", "method": method})
        for n in range(count)
        for method in ("GET", "POST")
    )
    assert worker.run_until_empty() == 2 * count
    inside.was_left_alone(public=2 * count)
    assert sorted(public.paths) == sorted(2 * [f"/{n}" for n in range(count)])


def test_no_answer_to_an_alert_leads_anywhere_else(inside: Inside, public: Public) -> None:
    alert = Alert(kind="task_failed", summary="something")
    for number, (status, _, _) in enumerate(public.answers):
        url = f"http://{PUBLIC}:{public.port}/{number}"
        try:
            WebhookRecipient(url, allow_http=True, context=STRICT).send(alert)
        except AlertNotSent:
            assert status >= 300
        else:
            assert status < 300
    inside.was_left_alone(public=len(public.answers))
    assert public.paths == [f"/{n}" for n in range(len(public.answers))]


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "all_proxy", "no_proxy"])
def test_no_proxy_of_the_environment_is_used(
    world: World, inside: Inside, public: Public, name: str
) -> None:
    for each in (name, name.upper()):
        world.monkeypatch.setenv(each, f"http://127.0.0.1:{inside.port}")
    url = f"http://public.example:{public.port}/"
    world.queue.push(make_task(name="http", payload={"url": url}))
    assert make_worker(world, lambda host: [PUBLIC]).run_until_empty() == 1
    webhook = f"http://{PUBLIC}:{public.port}/"
    WebhookRecipient(webhook, allow_http=True, context=STRICT).send(
        Alert(kind="task_failed", summary="something")
    )
    inside.was_left_alone(public=2)


WEBHOOKS = [
    "file:///etc/passwd",
    "ftp://127.0.0.1/",
    "gopher://127.0.0.1/",
    "data:text/plain,x",
    "//127.0.0.1/",
    "http:127.0.0.1",
    "https:///127.0.0.1",
    "https://user@127.0.0.1/",
    "https://127.0.0.1\\@public.example/",
    "https://127.0.0.1\n/",
    "https://127.0.0.1:99999/",
    "https://[::1/",
    "https://１２７.0.0.1/",
]


@pytest.mark.parametrize("url", WEBHOOKS)
def test_a_mistake_in_the_url_of_a_webhook_connects_nowhere(inside: Inside, url: str) -> None:
    """Operators may name the inside, their own; but the URL has to be one, without tricks."""
    with pytest.raises(ValueError, match="webhook"):
        WebhookRecipient(url, context=STRICT)
    inside.was_left_alone()


# --- the socket of the server itself --------------------------------------------------------------


def test_the_socket_of_an_embedded_server_cannot_be_named(
    own_server: Callable[..., EmbeddedServer], world: World, inside: Inside
) -> None:
    """It has no TCP port, and no URL leads to a file."""
    path = urlsplit(own_server().url).path
    escaped = path.replace("/", "%2F")
    urls = [f"http+unix://{escaped}/", f"unix://{path}", f"http://unix:{path}:/", f"file://{path}"]
    urls += [f"http://{escaped}/", f"http://localhost{path}", f"http://[{path}]/", path]
    inside.tried.clear()
    ids = world.queue.push_many(make_task(name="http", payload={"url": url}) for url in urls)
    assert make_worker(world).run_until_empty() == len(urls)
    inside.was_left_alone()
    assert ended(world, ids) == {}
