"""How connections end: of clients that are slow, and of all when the server is to end."""

import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
from helpers.browser import Web
from helpers.fixtures import Spawn
from helpers.network import is_closed_after
from helpers.tasks import make_task
from helpers.waiting import eventually
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fairqueue.queue.queue import TaskQueue
from fairqueue.web import WebServer, create_app
from fairqueue.web.server import ClientLimits

DEADLINE_S = 60  # for what has to happen
SHORT = ClientLimits(head=0.3, body=0.3, idle=0.3, write=0.3)
# For all that must not be over meanwhile.
LONG = ClientLimits(head=600, body=600, idle=600, write=600)


async def _echo(request: Request) -> Response:
    return PlainTextResponse(f"{len(await request.body())} bytes")


async def _large(_: Request) -> Response:
    return Response(b"x" * 50_000_000)


APP = Starlette(routes=[Route("/", _echo, methods=["GET", "POST"]), Route("/large", _large)])


@contextmanager
def connected(server: WebServer) -> Iterator[socket.socket]:
    """A connection of a client that speaks for itself."""
    with socket.create_connection((server.host, server.port), DEADLINE_S) as sock:
        yield sock


def rest_of(sock: socket.socket) -> bytes:
    """What still comes until the other side closes."""
    parts = []
    try:
        while part := sock.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answer_of(sock: socket.socket) -> bytes:
    """One answer with a short body, of which the connection stays open."""
    text = b""
    while not re.search(rb"\r\n\r\n\d+ bytes$", text):
        part = sock.recv(65_536)
        assert part, text
        text += part
    return text


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
LONG_POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        (ClientLimits(head=0.3), b""),
        (ClientLimits(head=0.3), b"GET / HTTP/1.1\r\nHost: x\r\n"),
        (ClientLimits(body=0.3), POST + b"12345"),
        (ClientLimits(body=0.3), POST),
    ],
)
def test_a_request_that_is_half_sent_is_dropped(limits: ClientLimits, sent: bytes) -> None:
    with WebServer(APP, limits=limits) as server, connected(server) as sock:
        sock.sendall(sent)
        assert rest_of(sock) == b""


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX-Slow: ", LONG_POST])
def test_a_byte_now_and_then_buys_no_time(start: bytes) -> None:
    """However slowly it goes on: the time is that of the whole head, or body."""
    limits = ClientLimits(head=0.5, body=0.5, least_rate=1_000_000)
    with WebServer(APP, limits=limits) as server, connected(server) as sock:
        sock.sendall(start)
        sock.settimeout(0.05)
        eventually(lambda: is_closed_after(sock, b"x"), "it was dropped")


def test_a_connection_that_nobody_uses_is_dropped_and_a_used_one_is_kept() -> None:
    with WebServer(APP, limits=ClientLimits(idle=0.3)) as server, connected(server) as sock:
        for _ in range(3):
            sock.sendall(GET)
            assert answer_of(sock).endswith(b"0 bytes")
        assert rest_of(sock) == b""


def test_the_second_request_of_a_connection_may_not_be_half_sent_either() -> None:
    limits = ClientLimits(head=0.3, idle=600)
    with WebServer(APP, limits=limits) as server, connected(server) as sock:
        sock.sendall(GET)
        answer_of(sock)
        sock.sendall(b"GET / HTTP/1.1\r\n")
        assert rest_of(sock) == b""


def test_an_answer_that_nobody_reads_is_not_kept_for_ever() -> None:
    with WebServer(APP, limits=ClientLimits(write=0.3)) as server, connected(server) as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 200"
        connections = server._server.server_state.connections
        eventually(lambda: not connections, "the server has given up")


def test_a_request_in_pieces_that_comes_in_time_is_answered() -> None:
    with WebServer(APP, limits=LONG) as server, connected(server) as sock:
        for byte in POST + b"0123456789":
            sock.sendall(bytes([byte]))
        assert answer_of(sock).endswith(b"10 bytes")
        sock.sendall(POST + b"0123456789" + GET)  # the next one right behind it
        text = answer_of(sock)
        while text.count(b"HTTP/1.1 200") < 2:
            text += answer_of(sock)


def test_a_body_has_more_time_the_more_of_it_has_come() -> None:
    """A megabyte at the least rate takes longer than the time of a body that does not come."""
    limits = ClientLimits(body=0.2, least_rate=1000)
    size = 1_000_000
    with WebServer(APP, limits=limits) as server, connected(server) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        sock.sendall(b"x" * (size - 1))
        time.sleep(0.6)
        sock.sendall(b"x")
        assert answer_of(sock).endswith(b"1000000 bytes")


def test_an_open_stream_outlasts_the_times_of_requests(web: Web, queue: TaskQueue) -> None:
    app = create_app(queue, auth=False)
    with (
        WebServer(app, limits=SHORT) as server,
        httpx.stream("GET", f"{server.url}/events", timeout=DEADLINE_S) as stream,
    ):
        lines = stream.iter_lines()
        began = time.monotonic()
        while time.monotonic() < began + 3 * 0.3:
            queue.push(make_task())
            next(line for line in lines if line.startswith("data:"))


def test_more_connections_than_it_can_have_are_closed_at_once() -> None:
    limits = ClientLimits(connections=3, head=600)
    with WebServer(APP, limits=limits) as server, ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(connected(server))
            sock.sendall(GET)
            answer_of(sock)
        refused = stack.enter_context(connected(server))
        assert rest_of(refused) == b""
        sock.close()
        eventually(lambda: answers(server), "there is room again")


def answers(server: WebServer) -> bool:
    """Whether somebody who comes now is let in."""
    with connected(server) as sock, suppress(ConnectionError):
        sock.sendall(GET)
        return sock.recv(12) == b"HTTP/1.1 200"
    return False


# --- the end --------------------------------------------------------------------------------------

OUTER = """
import sys
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from fairqueue import TaskQueue
from fairqueue.web import create_app

queue = TaskQueue.from_url(sys.argv[1])
inner = create_app(queue, auth=False)
inner.state.fairqueue.live_updates._stream_s = 3600.0  # it does not end by itself meanwhile
app = Starlette(routes=[Mount("/ops", inner)])
config = uvicorn.Config(app, port=0, log_level="info")
config.load()
server = uvicorn.Server(config)
sock = config.bind_socket()
print(sock.getsockname()[1], flush=True)
server.run(sockets=[sock])
print("ended", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_open_page_does_not_keep_the_server_that_it_is_mounted_in(
    spawn: Spawn, redis_url: str, number: int
) -> None:
    process = spawn(OUTER, redis_url)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    url = f"http://127.0.0.1:{port}/ops/events"
    with httpx.stream("GET", url, timeout=DEADLINE_S) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        process.send_signal(number)
        process.wait(DEADLINE_S)
        list(lines)  # the stream was ended in order
