"""HTTP tasks against real servers: what is sent, retried, kept, hidden, and never connected to."""

import gzip
import html
import ipaddress
import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.tasks import make_task
from helpers.world import World
from hypothesis import example, given
from hypothesis import strategies as st

from fairqueue import Discard, Retry, Task, TaskContext, TaskQueue, Worker
from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, InvalidPayload
from fairqueue.http_tasks.http import RESULT_BODY_BYTES, HttpTasks, SecretRequest, verify_signature
from fairqueue.http_tasks.network import LOOKUPS, forbidding_rule
from fairqueue.http_tasks.requests import check_request
from fairqueue.validation import MAX_RESULT_BYTES, encode_json

ROOT = Path(__file__).parents[2]
SHORT = 0.3  # seconds of a time-out that is meant to pass
TOKEN = 'zqYw-1"/zqYw\\91'  # needs escapes in JSON and in URLs


# --- a server -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request as the server got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Call(BaseHTTPRequestHandler):
    """One request, answered as the test's function says."""

    protocol_version = "HTTP/1.1"
    server: "LocalServer"

    def answer(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        """A whole answer; headers with _ for -."""
        self.send_response(status)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | names).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(method=self.command, path=self.path, headers=headers, body=body)
        self.server.seen.append(seen)
        self.close_connection = True
        self.server.script(self)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

    def log_message(self, format: str, *args: object) -> None:
        pass


class LocalServer(ThreadingHTTPServer):
    """Listens on the loopback address; `script` answers, `over` is set when the test ends."""

    daemon_threads = False  # so that closing waits for them
    block_on_close = True
    request_queue_size = 100  # a connection past it would wait a second for its next try

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Call)
        self.seen: list[Seen] = []
        self.connections = 0
        self.over = threading.Event()
        self.script: Callable[[Call], None] = lambda call: call.answer(body=b"hello")
        self.tls: ssl.SSLContext | None = None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.tls is not None:
            with self.tls.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)
        else:
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        assert isinstance(sys.exc_info()[1], OSError)  # the client has had enough

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture
def web() -> Iterator[LocalServer]:
    web = LocalServer()
    yield web
    web.close()


STRICT = ssl.create_default_context()


def make(**settings: Any) -> HttpTasks:
    """HTTP tasks that may call the loopback address, unless told otherwise."""
    usual: dict[str, Any] = {
        "allow_private": ["127.0.0.0/8"],
        "allow_http": True,
        "ssl_context": STRICT,  # to make one for each test takes longer than the tests
    }
    return HttpTasks(**usual | settings)


@dataclass(kw_only=True)
class Run:
    """What a handler may know of its run."""

    task_id: str = "task-1"
    attempt: int = 1
    cancelled: bool = False
    task: Task = field(default_factory=make_task)


def call(http: HttpTasks, url: str, run: Run | None = None, **fields: Any) -> dict[str, Any]:
    """One call of the handler, without a worker."""
    return http.handle({"url": url, **fields}, cast(TaskContext, run or Run()))


def resolving(**names: list[str]) -> Callable[[str], list[str]]:
    """A resolver for names, with _ for a dot."""
    known = {name.replace("_", "."): addresses for name, addresses in names.items()}
    return lambda host: known[host]


# --- what is sent and kept ------------------------------------------------------------------------


def test_a_request_is_sent_as_the_payload_says(web: LocalServer) -> None:
    headers = {"X-Tenant": "alice", "Accept": "application/json"}
    call(
        make(), web.url + "?a=1 2#part", method="POST", headers=headers, json={"n": [1, None, "é"]}
    )
    (seen,) = web.seen
    agent = seen.headers.pop("user-agent")
    assert re.fullmatch(r"fairqueue/\d+\.\d+.*", agent)
    assert (seen.method, seen.path) == ("POST", "/hook?a=1%202")
    assert seen.headers == {
        "host": f"127.0.0.1:{web.port}",
        "x-tenant": "alice",
        "accept": "application/json",
        "content-type": "application/json",
        "content-length": str(len(seen.body)),
        "idempotency-key": "task-1",
        "fairqueue-attempt": "1",
        "accept-encoding": "identity",
        "connection": "close",
    }
    assert json.loads(seen.body) == {"n": [1, None, "é"]}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"])
def test_each_method_works_without_a_body(web: LocalServer, method: str) -> None:
    result = call(make(), web.url, method=method)
    assert [(seen.method, seen.body) for seen in web.seen] == [(method, b"")]
    assert result["body"] == ("" if method == "HEAD" else "hello")


def test_the_user_may_name_the_content_and_the_agent(web: LocalServer) -> None:
    headers = {"content-type": "application/vnd.api+json", "user-agent": "shop"}
    call(make(), web.url, method="PUT", headers=headers, json=None)
    (seen,) = web.seen
    assert seen.body == b"null"
    assert seen.headers["content-type"] == "application/vnd.api+json"
    assert seen.headers["user-agent"] == "shop"


def test_the_result_holds_the_answer(web: LocalServer) -> None:
    web.script = lambda call: call.answer(201, "grün".encode(), Content_Type="text/plain", X="y")
    result = call(make(), web.url)
    assert result.pop("seconds") >= 0
    assert result == {
        "status": 201,
        "headers": {"content-type": "text/plain", "content-length": "5"},
        "body": "grün",
        "truncated": False,
    }


@pytest.mark.parametrize(
    ("task_id", "key"),
    [
        ("a:1700000000000", "a:1700000000000"),
        ("schöne aufgabe", "sch%C3%B6ne%20aufgabe"),
        ("100%", "100%25"),
    ],
)
def test_the_idempotency_key_is_the_task_id(web: LocalServer, task_id: str, key: str) -> None:
    call(make(), web.url, Run(task_id=task_id))
    assert web.seen[0].headers["idempotency-key"] == key


def test_no_cookie_and_no_connection_is_kept_for_the_next_call(web: LocalServer) -> None:
    web.script = lambda call: call.answer(Set_Cookie="session=alice")
    http = make()
    for _ in range(2):
        call(http, web.url)
    assert web.connections == 2
    assert "cookie" not in web.seen[1].headers


def test_the_environment_names_no_proxy(web: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert call(make(), web.url)["status"] == 200


def test_threads_share_it(web: LocalServer) -> None:
    web.script = lambda call: call.answer(body=call.headers["Idempotency-Key"].encode())
    http = make()
    ids = [f"task-{n}" for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        bodies = list(threads.map(lambda i: call(http, web.url, Run(task_id=i))["body"], ids))
    assert bodies == ids


def test_a_cancelled_task_is_not_sent(web: LocalServer) -> None:
    with pytest.raises(Retry, match="cancelled"):
        call(make(), web.url, Run(cancelled=True))
    assert web.connections == 0


# --- retries, through a worker --------------------------------------------------------------------


def test_a_failed_call_is_repeated_with_the_same_key(world: World, web: LocalServer) -> None:
    statuses = iter([500, 200])
    web.script = lambda call: call.answer(next(statuses), b"well")
    worker = Worker(world.queue)
    make().register(worker, retries=1, backoff=2.0, jitter="none")
    payload = {"url": web.url, "method": "POST", "json": {"n": 1}}
    world.queue.push(make_task(task_id="hook", name="http", payload=payload))
    assert worker.run_once() == 1
    assert (world.info("hook").state, worker.run_once()) == ("delayed", 0)
    assert "answered 500: well" in str(world.info("hook").error)
    world.advance(2)
    assert worker.run_once() == 1
    assert world.info("hook").state == "finished"
    assert world.info("hook").result["body"] == "well"
    sent = [(s.headers["idempotency-key"], s.headers["fairqueue-attempt"]) for s in web.seen]
    assert sent == [("hook", "1"), ("hook", "2")]
    assert web.seen[0].body == web.seen[1].body


def test_a_dead_server_ends_in_the_dead_letters(world: World, web: LocalServer) -> None:
    web.script = lambda call: call.answer(503, Retry_After="120")
    worker = Worker(world.queue)
    make().register(worker, "call", retries=1)
    world.queue.push(make_task(task_id="hook", name="call", payload={"url": web.url}))
    assert worker.run_once() == 1
    world.advance(119)
    assert worker.run_once() == 0  # as the server asked
    world.advance(1)
    assert worker.run_once() == 1
    assert world.info("hook").state == "buried"


@pytest.mark.parametrize("status", [400, 401, 404, 410, 422])
def test_a_refusal_is_not_tried_again(world: World, web: LocalServer, status: int) -> None:
    web.script = lambda call: call.answer(status, b"no such thing " + b"x" * 5000)
    worker = Worker(world.queue)
    make().register(worker)
    world.queue.push(make_task(task_id="hook", name="http", payload={"url": web.url}))
    assert worker.run_once() == 1
    found = world.info("hook")
    assert found.state == "buried"
    assert f"answered {status}: no such thing xxx" in str(found.error)
    assert len(str(found.error)) < 600


@pytest.mark.parametrize("payload", [{}, {"url": "http://127.0.0.1/", "method": "BREW"}])
def test_a_bad_request_payload_is_not_retried(world: World, payload: dict[str, Any]) -> None:
    worker = Worker(world.queue)
    make().register(worker)
    world.queue.push(make_task(task_id="hook", name="http", payload=payload))
    assert worker.run_once() == 1
    assert world.info("hook").state == "buried"
    assert "payload." in str(world.info("hook").error)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 502, 503, 504, 599])
def test_a_status_that_may_pass_is_tried_again(web: LocalServer, status: int) -> None:
    web.script = lambda call: call.answer(status)
    with pytest.raises(Retry, match=f"answered {status}"):
        call(make(), web.url)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
def test_redirects_are_not_followed(web: LocalServer, status: int) -> None:
    web.script = lambda call: call.answer(status, Location=f"http://127.0.0.1:{web.port}/other")
    with pytest.raises(Discard, match=r"redirects are not followed.*/other"):
        call(make(), web.url)
    assert [seen.path for seen in web.seen] == ["/hook"]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("3600", 3600.0),
        ("3601", 3600.0),
        ("9" * 400, 3600.0),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0),  # the clock stands at 22:13:20
        ("Wed, 14 Nov 2033 22:13:50 GMT", 3600.0),
        ("Tue, 14 Nov 2023 22:13:10 GMT", None),
        ("0", None),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("Tue, 99 Nov 2023 22:13:50 GMT", None),
        ("", None),
    ],
)
def test_retry_after_is_read_in_both_forms(
    web: LocalServer, clock: ManualClock, value: str, seconds: float | None
) -> None:
    web.script = lambda call: call.answer(429, Retry_After=value)
    with pytest.raises(Retry) as caught:
        call(make(clock=clock), web.url)
    assert caught.value.in_ == seconds


# --- servers that misbehave -----------------------------------------------------------------------


def test_a_server_that_hangs_is_given_up(web: LocalServer) -> None:
    web.script = lambda call: cast(None, web.over.wait(60))
    with pytest.raises(Retry, match=r"timed out after 0\.3 s"):
        call(make(timeout=SHORT), web.url)


def dribble(call: Call) -> None:
    """A byte now and then, sooner than any time-out between two of them."""
    call.send_response(200)
    call.send_header("Content-Length", "400")
    call.end_headers()
    for _ in range(400):
        call.wfile.write(b"x")
        call.server.over.wait(0.02)


def test_a_server_that_dribbles_its_body_does_not_stretch_the_time_out(web: LocalServer) -> None:
    web.script = dribble
    with pytest.raises(Retry, match="timed out"):
        call(make(), web.url, timeout=SHORT)


def test_slow_headers_do_not_extend_the_time_out(web: LocalServer) -> None:
    def script(call: Call) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 400 + b"\r\nContent-Length: 0\r\n\r\n":
            call.wfile.write(bytes([byte]))
            web.over.wait(0.02)

    web.script = script
    with pytest.raises(Retry, match="timed out"):
        call(make(), web.url, timeout=SHORT)


def test_a_server_that_does_not_read_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        with pytest.raises(Retry, match="timed out"):
            call(make(timeout=SHORT), url, method="POST", json="x" * 200_000)


def test_the_workers_time_out_holds_where_the_payload_asks_for_more(web: LocalServer) -> None:
    web.script = lambda call: cast(None, web.over.wait(60))
    with pytest.raises(Retry, match=r"timed out after 0\.3 s"):
        call(make(timeout=SHORT), web.url, timeout=600)


def test_a_name_server_that_hangs_is_given_up() -> None:
    over = threading.Event()

    def resolver(host: str) -> list[str]:
        over.wait(60)
        return ["127.0.0.1"]

    try:
        with pytest.raises(Retry, match="the lookup of the host took too long"):
            call(make(resolver=resolver, timeout=SHORT), "http://slow.example/")
    finally:
        over.set()


def test_lookups_that_ended_make_room_for_others() -> None:
    http = make(allow_private=[], resolver=lambda host: ["127.0.0.1"], timeout=5)
    for _ in range(LOOKUPS + 1):
        with pytest.raises(Discard, match="loopback"):
            call(http, "http://hooks.example/")


def test_a_name_that_cannot_be_looked_up_is_tried_again() -> None:
    def resolver(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(Retry, match=r"the lookup of the host failed.*not known"):
        call(make(resolver=resolver), "http://typo.example/")
    with pytest.raises(Retry, match="no address"):
        call(make(resolver=lambda host: []), "http://typo.example/")


def test_a_closed_port_is_tried_again() -> None:
    with socket.socket() as taken:  # nobody else gets the port, and nobody listens
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(Retry, match="the connection failed"):
            call(make(), f"http://127.0.0.1:{taken.getsockname()[1]}/")


def test_the_next_address_is_tried_if_the_first_is_dead(web: LocalServer) -> None:
    resolver = resolving(hooks_example=["127.0.0.2", "127.0.0.1"])
    assert call(make(resolver=resolver), f"http://hooks.example:{web.port}/")["status"] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"what?",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nfew",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nbytes of x",
    ],
    ids=["nothing", "no HTTP", "too few bytes", "no length", "no chunk", "long header", "101"],
)
def test_an_answer_that_is_broken_is_tried_again(web: LocalServer, raw: bytes) -> None:
    web.script = lambda call: cast(None, call.wfile.write(raw))
    with pytest.raises(Retry, match=r"is not HTTP, or incomplete|connection was lost"):
        call(make(), web.url)


def endless(headers: dict[str, str]) -> Callable[[Call], None]:
    def script(call: Call) -> None:
        call.send_response(200)
        for name, value in headers.items():
            call.send_header(name, value)
        call.end_headers()
        while not call.server.over.is_set():
            call.wfile.write(b"x" * 65536)

    return script


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "9" * 15}], ids=["none", "huge"])
def test_an_endless_body_is_read_up_to_the_limit(web: LocalServer, headers: dict[str, str]) -> None:
    web.script = endless(headers)
    result = call(make(max_body=1000), web.url)
    assert (result["body"], result["truncated"]) == ("x" * 1000, True)


def test_no_more_is_read_than_the_server_said(web: LocalServer) -> None:
    web.script = lambda call: call.answer(body=b"hello", Content_Length="2")
    result = call(make(), web.url)
    assert (result["body"], result["truncated"]) == ("he", False)


@pytest.mark.parametrize(("size", "truncated"), [(9, False), (10, False), (11, True)])
def test_only_a_long_body_is_truncated(web: LocalServer, size: int, truncated: bool) -> None:
    web.script = lambda call: call.answer(body=b"x" * size)
    result = call(make(max_body=10), web.url)
    assert (result["body"], result["truncated"]) == ("x" * min(size, 10), truncated)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_answer_is_not_unpacked(web: LocalServer, encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    bomb = pack(b"0" * 20_000_000)
    web.script = lambda call: call.answer(body=bomb, Content_Encoding=encoding)
    result = call(make(max_body=100), web.url)
    assert result["headers"]["content-encoding"] == encoding
    assert result["body"] == bomb[:100].decode("utf-8", "replace")
    assert result["truncated"]


@pytest.mark.parametrize("body", [b"\x00", b"\xff", b'"', "€".encode(), b"x"])
def test_a_result_always_fits_what_can_be_stored(web: LocalServer, body: bytes) -> None:
    web.script = lambda call: call.answer(body=body * 20_000, Content_Type="\x01" * 1000)
    result = call(make(), web.url)
    assert encode_json(result, "result", MAX_RESULT_BYTES)
    assert result["truncated"]
    assert len(result["body"]) > 1000


# --- secrets --------------------------------------------------------------------------------------


def secrets_of(**known: str) -> Callable[[SecretRequest], str | None]:
    return lambda wanted: known.get(wanted.name)


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("secret:API", TOKEN),
        ("Bearer secret:API", f"Bearer {TOKEN}"),
        ("secret:API secret:OTHER", f"{TOKEN} other one"),
        ("key=secret:API", "key=secret:API"),  # only whole words are references
        ("", ""),
    ],
)
def test_references_in_headers_are_replaced(web: LocalServer, value: str, sent: str) -> None:
    http = make(secrets=secrets_of(API=TOKEN, OTHER="other one"))
    call(http, web.url, headers={"Authorization": value})
    assert web.seen[0].headers["authorization"] == sent


def test_secrets_are_prefixed_variables(web: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRQUEUE_SECRET_API", TOKEN)
    monkeypatch.setenv("DATABASE_PASSWORD", "of no task's concern")
    call(make(), web.url, headers={"X-Key": "secret:API"})
    assert web.seen[0].headers["x-key"] == TOKEN
    with pytest.raises(Discard, match="secret:DATABASE_PASSWORD is not known to this worker"):
        call(make(), web.url, headers={"X-Key": "secret:DATABASE_PASSWORD"})


def test_who_gives_secrets_is_told_whose_task_it_is_and_where_they_go(web: LocalServer) -> None:
    asked = []

    def secrets(wanted: SecretRequest) -> str:
        asked.append(wanted)
        return "s"

    call(make(secrets=secrets), web.url, headers={"X-Key": "secret:team/key-1"})
    assert asked == [SecretRequest(name="team/key-1", user_id="alice", host="127.0.0.1")]


def test_users_of_one_id_in_two_tenants_have_secrets_of_their_own(
    web: LocalServer, queue: TaskQueue
) -> None:
    vault = {(None, "ann"): "plain", ("acme", "ann"): "of acme", ("globex", "ann"): "of globex"}
    http = make(secrets=lambda wanted: vault.get((wanted.tenant, wanted.user_id)))
    worker = Worker(queue, pools=["default", "outside"])
    http.register(worker, pool="outside")
    payload = {"url": web.url, "headers": {"X-Key": "secret:KEY"}}
    for tenant, _ in vault:
        fields: dict[str, Any] = {"payload": payload, "pool": "outside"}
        queue.push(Task.create(user_id="ann", tenant=tenant, name="http", **fields))
    worker.run_until_empty()
    assert sorted(seen.headers["x-key"] for seen in web.seen) == ["of acme", "of globex", "plain"]


def test_a_missing_secret_ends_the_task_and_a_missing_vault_does_not(web: LocalServer) -> None:
    def away(wanted: SecretRequest) -> str:
        raise ConnectionError(f"vault said: {TOKEN}")

    with pytest.raises(Discard, match="secret:API is not known to this worker"):
        call(make(secrets=secrets_of()), web.url, headers={"X-Key": "secret:API"})
    with pytest.raises(Retry, match="the lookup of secret:API failed: ConnectionError") as caught:
        call(make(secrets=away), web.url, headers={"X-Key": "secret:API"})
    assert TOKEN not in str(caught.value)
    assert web.connections == 0


def test_a_secret_is_asked_for_once_however_often_it_is_referred_to(web: LocalServer) -> None:
    asked: list[str] = []

    def secrets(wanted: SecretRequest) -> str:
        asked.append(wanted.name)
        return wanted.name.lower()

    http = make(secrets=secrets, signing_secret="secret:B")
    call(http, web.url, headers={"X": "secret:A secret:B secret:A", "Y": "secret:A"})
    assert (web.seen[0].headers["x"], web.seen[0].headers["y"]) == ("a b a", "a")
    assert asked == ["A", "B"]


def test_a_vault_that_is_slow_is_asked_no_longer_than_the_time_out(web: LocalServer) -> None:
    asked: list[str] = []

    def slow(wanted: SecretRequest) -> str:
        asked.append(wanted.name)
        web.over.wait(SHORT)
        return "s"

    headers = {"X": " ".join(f"secret:N{number}" for number in range(50))}
    with pytest.raises(Retry, match="the lookup of secrets took too long"):
        call(make(secrets=slow), web.url, headers=headers, timeout=SHORT * 1.5)
    assert len(asked) == 2
    assert web.connections == 0


def test_a_header_that_is_too_long_with_its_secrets_is_not_sent(web: LocalServer) -> None:
    http = make(secrets=secrets_of(API="s" * 4096))
    call(http, web.url, headers={"X": "secret:API"})
    with pytest.raises(
        Discard, match=r"headers\.X must be at most 8192 characters with its secrets"
    ):
        call(http, web.url, headers={"X": "secret:API secret:API"})
    with pytest.raises(Discard, match="secret:API must be 1 to 8192 printable"):
        call(make(secrets=secrets_of(API="s" * 8193)), web.url, headers={"X": "secret:API"})
    assert web.connections == 1


@pytest.mark.parametrize("value", ["", "two\nlines", "grün", "newline\n", " padded"])
def test_a_secret_that_cannot_be_sent_is_not_shown(web: LocalServer, value: str) -> None:
    with pytest.raises(Discard, match="secret:API must be 1 to 8192 printable") as caught:
        call(make(secrets=secrets_of(API=value)), web.url, headers={"X-Key": "secret:API"})
    assert not value or value not in str(caught.value)
    assert web.connections == 0


ECHOES = {
    "plain": TOKEN,
    "in JSON": json.dumps({"you sent": f"Bearer {TOKEN}"}),
    "in a URL": "https://x.example/?token=zqYw-1%22%2FzqYw%5C91",
    "twice": TOKEN + TOKEN,
}


@pytest.mark.parametrize("status", [200, 302, 404, 500])
@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
def test_a_secret_that_the_server_repeats_shows_nowhere(
    world: World, web: LocalServer, caplog: pytest.LogCaptureFixture, status: int, echo: str
) -> None:
    caplog.set_level(logging.DEBUG, "fairqueue")
    web.script = lambda call: call.answer(
        status, echo.encode(), Content_Type=echo, Location=echo, Retry_After=echo
    )
    worker = Worker(world.queue)
    http = make(secrets=secrets_of(API=TOKEN, KEY="zqYw-1"), signing_secret="secret:KEY")
    http.register(worker)
    headers = {"Authorization": "Bearer secret:API"}
    world.queue.push(
        make_task(task_id="hook", name="http", payload={"url": web.url, "headers": headers})
    )
    assert worker.run_once() == 1
    assert web.seen[0].headers["authorization"] == f"Bearer {TOKEN}"
    found = world.info("hook")
    assert "***" in str(found.result or found.error)
    assert "http_answered" in caplog.text
    logged = [vars(record) for record in caplog.records]
    for place in (world.dump(), caplog.text, logged, http, vars(http)):
        assert "zqYw" not in repr(place)


def in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def in_url(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def in_go(text: str) -> str:
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", in_json(text))


def lower(text: str) -> str:
    """With the escapes of a URL in lower case."""
    return re.sub("%..", lambda match: match[0].lower(), text)


WRITERS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "JSON": in_json,
    "JSON of PHP": lambda text: in_json(text).replace("/", "\\/"),
    "JSON of Go": in_go,
    "JSON in upper case": lambda text: in_go(text).replace("\\u003c", "\\u003C"),
    "JavaScript": lambda text: re.sub(r"\W", lambda match: f"\\x{ord(match[0]):02X}", text),
    "slashes": lambda text: re.sub(r"(['\"\\])", r"\\\1", text),
    "URL": in_url,
    "URL in lower case": lambda text: lower(in_url(text)),
    "URL that keeps slashes": urllib.parse.quote,
    "form": urllib.parse.quote_plus,
    "HTML": html.escape,
    "HTML of PHP": lambda text: html.escape(text).replace("&#x27;", "&#039;"),
    "HTML with all names": lambda text: html.escape(text).replace("&#x27;", "&apos;"),
    "HTML of OWASP": lambda text: html.escape(text).replace("/", "&#x2F;"),
    "JSON in HTML": lambda text: html.escape(in_json(text)),
    "JSON in a URL": lambda text: in_url(in_json(text)),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
@pytest.mark.parametrize(
    "secret",
    [
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
        "a<b>&c'd\"e",
        TOKEN,
        "two words+=%20",
        "\\\\host\\share\\",
        "\\/\\/&amp;",
    ],
)
def test_a_secret_is_masked_however_an_answer_writes_it(
    web: LocalServer, secret: str, write: Callable[[str], str]
) -> None:
    web.script = lambda call: call.answer(body=f"<{write(secret)}>-{secret[:-1]}?".encode())
    result = call(make(secrets=secrets_of(API=secret)), web.url, headers={"X": "secret:API"})
    assert result["body"] == f"<***>-{secret[:-1]}?"  # and what is not all of it stays


@pytest.mark.parametrize("row", ["\\", "\\/", "%", "&", "\\u005c"])
def test_a_server_cannot_hold_up_the_search_for_a_secret(web: LocalServer, row: str) -> None:
    body = (row.replace("\\", "\\\\") * 2000).encode()[:8000]
    web.script = lambda call: call.answer(body=body)
    http = make(secrets=secrets_of(API=row * 50 + "x"), timeout=30)
    result = call(http, web.url, headers={"X": "secret:API"})
    assert result["body"] == body.decode()


@pytest.mark.parametrize("kept", range(1, 40))
def test_an_escaped_secret_cut_by_the_limit_does_not_show(web: LocalServer, kept: int) -> None:
    web.script = lambda call: call.answer(body=rb"--&#x003c;\u003cSECRET--%3C<SECRET" * 100)
    http = make(secrets=secrets_of(API="<<SECRET"), max_body=kept)
    result = call(http, web.url, headers={"X-Key": "secret:API"})
    assert re.fullmatch(r"[-*]*", result["body"])


@pytest.mark.parametrize("kept", range(1, 40))
def test_a_secret_across_the_end_of_what_is_kept_does_not_show(web: LocalServer, kept: int) -> None:
    web.script = lambda call: call.answer(body=b"--SECRET--SECRET-SECRET" * 100)
    http = make(secrets=secrets_of(API="SECRET"), max_body=kept)
    result = call(http, web.url, headers={"X-Key": "secret:API"})
    assert re.fullmatch(r"[-*]*", result["body"])
    assert len(result["body"]) <= kept
    assert result["truncated"]


# --- signatures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "body"),
    [({"method": "POST", "json": {"n": 1}}, b'{"n":1}'), ({"method": "GET"}, b"")],
)
def test_a_request_is_signed_for_its_receiver(
    web: LocalServer, clock: ManualClock, fields: dict[str, Any], body: bytes
) -> None:
    http = make(clock=clock, secrets=secrets_of(KEY="k"), signing_secret="secret:KEY")
    call(http, web.url, **fields)
    (seen,) = web.seen
    assert seen.body == body
    header = seen.headers["fairqueue-signature"]
    assert header.startswith("t=1700000000,v1=")
    assert verify_signature("k", header, seen.body, now=1_700_000_000)


# Made with: printf '1700000000.{"n":1}' | openssl dgst -sha256 -hmac k
KNOWN = "88fc0049412a7b70f6ebfe67467bdc9b94ea7b04ca4319f4bf7216e3b159f674"


@pytest.mark.parametrize(
    ("change", "genuine"),
    [
        ({}, True),
        ({"secret": b"k"}, True),
        ({"now": 1_700_000_300.0}, True),
        ({"now": 1_700_000_301.0}, False),
        ({"now": 1_699_999_700.0}, True),
        ({"now": 1_699_999_699.0}, False),
        ({"now": 1_700_000_031.0, "tolerance": 30.0}, False),
        ({"secret": "other"}, False),
        ({"body": b'{"n":2}'}, False),
        ({"body": b""}, False),
        ({"header": f"t=1700000001,v1={KNOWN}"}, False),
        ({"header": f"t=01700000000,v1={KNOWN}"}, False),
        ({"header": f"t=1700000000,v1={KNOWN.upper()}"}, False),
        ({"header": f"t=1700000000,v1={KNOWN[:-1]}"}, False),
        ({"header": f"t=1700000000,v1={KNOWN}0"}, False),
        ({"header": f"t=1700000000,v1={KNOWN}\n"}, False),
        ({"header": f"v1={KNOWN}"}, False),
        ({"header": f"t=-1,v1={KNOWN}"}, False),
        ({"header": f"t=١٧٠,v1={KNOWN}"}, False),
        ({"header": "t=1700000000,v1="}, False),
        ({"header": ""}, False),
        ({"header": None}, False),
    ],
)
def test_signatures_are_verified(change: dict[str, Any], genuine: bool) -> None:
    usual: dict[str, Any] = {
        "secret": "k",
        "header": f"t=1700000000,v1={KNOWN}",
        "body": b'{"n":1}',
        "now": 1_700_000_000.0,
    }
    assert verify_signature(**usual | change) is genuine


@pytest.mark.parametrize("secret", ["", b""])
def test_an_empty_secret_verifies_nothing(secret: str | bytes) -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        verify_signature(secret, f"t=1700000000,v1={KNOWN}", b"", now=0)


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("10.0.0.1", "private"),
        ("100.64.0.1", "shared address space"),
        ("100.127.255.255", "shared address space"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("169.254.169.254", "link-local"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.0.0.8", "reserved for protocols"),
        ("192.0.2.1", "documentation"),
        ("192.88.99.1", "6to4 relay"),
        ("192.168.1.1", "private"),
        ("198.18.0.1", "benchmarking"),
        ("198.51.100.1", "documentation"),
        ("203.0.113.1", "documentation"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.255", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("::127.0.0.1", "IPv4-compatible"),
        ("::ffff:127.0.0.1", "IPv4-mapped"),
        ("::ffff:8.8.8.8", "IPv4-mapped"),
        ("::ffff:0:127.0.0.1", "outside of 2000::/3"),
        ("64:ff9b::127.0.0.1", "NAT64"),
        ("64:ff9b::8.8.8.8", "NAT64"),
        ("64:ff9b:1::1", "NAT64"),
        ("100::1", "outside of 2000::/3"),
        ("2001::1", "Teredo"),
        ("2001:10::1", "reserved for protocols"),
        ("2001:db8::1", "documentation"),
        ("2002:7f00:1::", "6to4"),
        ("3fff::1", "documentation"),
        ("4000::1", "outside of 2000::/3"),
        ("5f00::1", "outside of 2000::/3"),
        ("fc00::1", "private"),
        ("fd12:3456::1", "private"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("fec0::1", "site-local"),
        ("ff02::1", "multicast"),
        ("8.8.8.8", None),
        ("100.63.255.255", None),
        ("100.128.0.1", None),
        ("172.32.0.1", None),
        ("223.255.255.255", None),
        ("2606:4700::1111", None),
        ("2a00:1450::1", None),
    ],
)
def test_only_the_public_internet_may_be_called(address: str, rule: str | None) -> None:
    found = forbidding_rule(ipaddress.ip_address(address))
    assert found is None if rule is None else str(found).startswith(rule)


@given(st.ip_addresses())
def test_no_address_that_python_knows_as_special_is_let_through(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    special = (
        not address.is_global
        or address.is_private
        or address.is_multicast
        or address.is_reserved
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
    )
    assert forbidding_rule(address) if special else True


@pytest.mark.parametrize(
    ("addresses", "rule"),
    [
        (["127.0.0.1"], "loopback"),
        (["93.184.216.34", "127.0.0.1"], "loopback"),
        (["127.0.0.1", "93.184.216.34"], "loopback"),
        (["::ffff:127.0.0.1"], "IPv4-mapped"),
        (["169.254.169.254"], "link-local"),
        (["fe80::1%2"], "link-local"),
    ],
)
def test_a_name_with_any_address_inside_is_not_connected_to(
    web: LocalServer, caplog: pytest.LogCaptureFixture, addresses: list[str], rule: str
) -> None:
    http = make(allow_private=[], resolver=resolving(evil_example=addresses))
    with pytest.raises(Discard, match=f"'evil.example'.*: {rule}") as caught:
        call(http, f"http://evil.example:{web.port}/")
    assert web.connections == 0
    (record,) = caplog.records
    blocked = vars(record)
    assert (blocked["event"], blocked["task"], blocked["user"], blocked["host"]) == (
        "http_blocked",
        "task-1",
        "alice",
        "evil.example",
    )
    # The address is for the operator; the task's owner is not told.
    assert ipaddress.ip_address(blocked["address"]) in map(ipaddress.ip_address, addresses)
    assert blocked["address"] not in str(caught.value)


SPELLINGS = [
    "127.0.0.1",
    "127.0.0.1.",
    "127。0。0。1",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0x7f.0.0.0x1",
    "0X7F.1",
    "017700000001",
    "0177.0.0.1",
    "127.0.0.01",
    "127.0.0.1..",
    "127.0.0.256",
    "1.2.3.4.5",
    "0",
    "0.0.0.0",
    "①②⑦.0.0.1",
    "１２７.0.0.1",
    "%31%32%37.0.0.1",
    "127.0.0.1%00.example",
    "localhost",
    "LOCALHOST.",
    "ⓛocalhost",
    "loc%61lhost",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "[fe80::1%25lo]",
    "[::1%lo]",
    "[::1%25lo]",
    "[::]",
    "[127.0.0.1]",
    "[::1",
    "::1",
    "user@127.0.0.1",
    "user:password@127.0.0.1",
    "@127.0.0.1",
    "public.example@127.0.0.1",
    "public.example\\@127.0.0.1",
    "public.example:80@127.0.0.1",
    "127.0.0.1\\.public.example",
    "public.example#@127.0.0.1:1",
    "127.0.0.1 public.example",
    "127.0.0.1\tpublic.example",
    "",
    ".",
    "-",
    "a..b",
    "a" * 64 + ".example",
    "xn--",
]


@pytest.mark.parametrize("host", SPELLINGS)
def test_no_spelling_of_a_host_leads_inside(web: LocalServer, host: str) -> None:
    """With the system's own resolver's readings of odd numbers: each ends at our server."""

    def gullible(name: str) -> list[str]:
        return ["127.0.0.1"]

    http = make(allow_private=[], resolver=gullible)
    with pytest.raises(Discard):
        call(http, f"http://{host}:{web.port}/")
    assert web.connections == 0


def test_the_default_resolver_is_the_systems(web: LocalServer) -> None:
    with pytest.raises(Discard, match="'localhost' has an address that is not allowed"):
        call(make(allow_private=[]), f"http://localhost:{web.port}/")
    assert web.connections == 0
    assert call(make(allow_private=["localhost"]), f"http://localhost:{web.port}/")["status"] == 200


def test_http_without_tls_is_blocked_unless_allowed(web: LocalServer) -> None:
    with pytest.raises(Discard, match="http:// is not allowed: use"):
        call(make(allow_http=False), web.url)
    assert web.connections == 0


@pytest.mark.parametrize(
    ("entry", "admitted"),
    [
        ("127.0.0.0/8", True),
        ("127.0.0.1", True),
        ("127.0.0.1/32", True),
        ("hooks.example", True),
        ("Hooks.Example.", True),
        ("hooks.example:{port}", True),
        ("hooks.example:1", False),
        ("example", False),
        ("other.hooks.example", False),
        ("10.0.0.0/8", False),
        ("127.0.0.2", False),
        ("::/0", False),
        ("::ffff:127.0.0.1", False),
        ("127.0.0.1:{port}", False),  # that is the host as it is written in the URL
    ],
)
def test_the_list_admits_hosts_and_ports(web: LocalServer, entry: str, admitted: bool) -> None:
    resolver = resolving(hooks_example=["127.0.0.1"])
    http = make(allow_private=[entry.format(port=web.port)], resolver=resolver)
    try:
        call(http, f"http://hooks.example:{web.port}/")
    except Discard:
        assert not admitted
    assert web.connections == (1 if admitted else 0)


def test_an_address_in_the_url_is_admitted_with_its_port(web: LocalServer) -> None:
    assert call(make(allow_private=[f"127.0.0.1:{web.port}"]), web.url)["status"] == 200
    with pytest.raises(Discard, match="loopback"):
        call(make(allow_private=["127.0.0.1:1"]), web.url)


def test_a_name_is_looked_up_once_and_that_address_is_connected_to(web: LocalServer) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])
    http = make(resolver=lambda host: next(answers))
    assert call(http, f"http://hooks.example:{web.port}/")["status"] == 200
    assert web.seen[0].headers["host"] == f"hooks.example:{web.port}"
    assert next(answers) == ["127.0.0.2"]


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of its own authority for hooks.example, and its key, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=hooks.example "
        "-addext subjectAltName=DNS:hooks.example -keyout key -out certificate",
        shell=True,
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=60,
    )
    both = folder / "both.pem"
    both.write_bytes((folder / "key").read_bytes() + (folder / "certificate").read_bytes())
    return both


@pytest.fixture
def secure(web: LocalServer, certificate: Path) -> list[str | None]:
    """Let the server speak TLS; the names that clients ask for."""
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda sock, name, context: names.append(name)
    web.tls = context
    return names


def trusting(certificate: Path, **names: list[str]) -> HttpTasks:
    context = ssl.create_default_context(cafile=str(certificate))
    return make(ssl_context=context, resolver=resolving(**names), allow_http=False)


def test_tls_is_checked_for_the_host_and_not_for_the_address(
    web: LocalServer, secure: list[str | None], certificate: Path
) -> None:
    http = trusting(certificate, hooks_example=["127.0.0.1"])
    assert call(http, f"https://hooks.example:{web.port}/")["status"] == 200
    assert secure == ["hooks.example"]
    assert web.seen[0].headers["host"] == f"hooks.example:{web.port}"


@pytest.mark.parametrize("host", ["other.example", "127.0.0.1"])
def test_a_certificate_for_another_host_is_refused_before_anything_is_sent(
    web: LocalServer, secure: list[str | None], certificate: Path, host: str
) -> None:
    http = trusting(certificate, other_example=["127.0.0.1"])
    with pytest.raises(Retry, match=r"the connection failed: .*certificate is not valid for"):
        call(http, f"https://{host}:{web.port}/")
    assert web.seen == []


def test_an_unknown_authority_is_refused(web: LocalServer, secure: list[str | None]) -> None:
    http = make(resolver=resolving(hooks_example=["127.0.0.1"]), ssl_context=None)
    with pytest.raises(Retry, match="CERTIFICATE_VERIFY_FAILED"):
        call(http, f"https://hooks.example:{web.port}/")
    assert web.seen == []


def test_a_handshake_that_hangs_is_given_up(certificate: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        http = trusting(certificate, hooks_example=["127.0.0.1"])
        with pytest.raises(Retry, match="timed out"):
            call(http, f"https://hooks.example:{silent.getsockname()[1]}/", timeout=SHORT)


# --- bad input ------------------------------------------------------------------------------------

GOOD = {"url": "https://hooks.example/"}


@pytest.mark.parametrize(
    "payload",
    [
        GOOD,
        {"url": "http://hooks.example:8080/a?b=c"},
        {"url": "https://bücher.example/ü"},
        {"url": "https://[2606:4700::1111]:8443/"},
        GOOD | {"method": "DELETE", "json": []},
        GOOD | {"timeout": 0.1, "headers": {"A": "", "B": "Bearer secret:X.y/z-1", "C": "a  b"}},
        GOOD | {"timeout": None},
        GOOD | {"headers": {"A": "secret:A " * 50 + "x"}},
    ],
)
def test_a_request_that_can_be_sent_is_accepted(payload: dict[str, Any]) -> None:
    check_request(payload)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("https://hooks.example/", "payload must be a dict"),
        ({}, "payload.url must be a string .* not None"),
        ({"url": 5}, "payload.url must be a string .* not 5"),
        ({"url": 10**5000}, "payload.url must be a string of at most 8192"),
        ({"url": "https://h.example/" + "x" * 8192}, "at most 8192 characters"),
        ({"url": "hooks.example"}, "payload.url must begin with https://.* not 'hooks.example'"),
        ({"url": "ftp://hooks.example/"}, "must begin with https://"),
        ({"url": "file:///etc/passwd"}, "must begin with https://"),
        ({"url": " https://hooks.example/"}, "must begin with https://"),
        ({"url": "https://bob@h.example/"}, "user name or password before 'h.example'"),
        ({"url": "https://h.example:0/"}, "must have a port from 1 to 65535, not 0"),
        ({"url": "https://h.example:65536/"}, "must have a port from 1 to 65535, not 65536"),
        ({"url": "https://h.example:-1/"}, "must have a port from 1 to 65535, not -1"),
        ({"url": "https://h.example:x/"}, "Invalid port: 'x'"),
        ({"url": "https://h.example/\n"}, "is malformed: Invalid non-printable"),
        ({"url": "https:///path"}, "has the host ''"),
        ({"url": "https://h!.example/"}, "has the host 'h!.example', which is neither"),
        ({"url": "https://[2606:4700::1111%25eth0]/"}, "which is neither a name nor an address"),
        ({"url": "https://2130706433/"}, "has the host '2130706433': an IPv4 address must be"),
        (GOOD | {"method": "TRACE"}, "payload.method must be one of GET, POST.* not 'TRACE'"),
        (GOOD | {"method": "post"}, "payload.method must be one of .* not 'post'"),
        (GOOD | {"method": ["GET"]}, "payload.method must be one of .* not an? "),
        (GOOD | {"method": 10**5000}, "payload.method must be one of .* not an? "),
        (GOOD | {"body": "x"}, "payload.body is not a field of an HTTP task, which has url"),
        (GOOD | {"json": 1}, "payload.json must not be set: a GET request has no body"),
        (GOOD | {"method": "HEAD", "json": 1}, "a HEAD request has no body"),
        (GOOD | {"method": "POST", "json": float("nan")}, "payload.json must be .* not nan"),
        (
            GOOD | {"method": "POST", "json": "x" * 300_000},
            "payload.json must be at most .* not 300002",
        ),
        (GOOD | {"timeout": 0}, "payload.timeout must be 0.1 to 3600 seconds, not 0"),
        (GOOD | {"timeout": 3601}, "payload.timeout must be .* seconds, not 3601"),
        (GOOD | {"timeout": 10**400 - 1}, "payload.timeout must be .* seconds, not "),
        (GOOD | {"timeout": "5"}, "payload.timeout must be a number of seconds .*, not '5'"),
        (GOOD | {"timeout": True}, "payload.timeout must be a number of seconds .*, not True"),
        (GOOD | {"headers": ["a"]}, "payload.headers must be an object .* not a list"),
        (GOOD | {"headers": {f"H{n}": "" for n in range(51)}}, "of at most 50 headers"),
        (
            GOOD | {"headers": {"A": "secret:A " * 30 + "x", "B": "secret:A " * 21 + "x"}},
            "payload.headers must refer to secrets at most 50 times, not 51",
        ),
    ],
)
def test_a_request_that_cannot_be_sent_is_named(payload: object, message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        check_request(payload)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", "x", "'' is not a valid header name"),
        ("Na me", "x", "'Na me' is not a valid header name"),
        ("Name:", "x", "'Name:' is not a valid header name"),
        ("Näme", "x", "'Näme' is not a valid header name"),
        ("X\r\nY", "x", "is not a valid header name"),
        ("X", 5, "headers.X must be a string"),
        ("X", None, "headers.X must be a string"),
        ("X", "x" * 8193, "headers.X must be a string of at most 8192"),
        ("X", "a\r\nHost: evil", "headers.X must be printable ASCII .* has the character '\\\\r'"),
        ("X", "a\nb", "headers.X must be printable ASCII .* has the character '\\\\n'"),
        ("X", "a\0b", "headers.X must be printable ASCII .* has the character"),
        ("X", "a\tb", "headers.X must be printable ASCII .* has the character"),
        ("X", "a\x7f", "headers.X must be printable ASCII .* has the character"),
        ("X", "grün", "headers.X must be printable ASCII .* has the character 'ü'"),
        ("X", " a", "headers.X must be printable ASCII .* has a space at its end"),
        ("X", "a ", "headers.X must be printable ASCII .* has a space at its end"),
        ("X", "secret:", "headers.X has an invalid reference to a secret"),
        ("X", "Bearer secret:a$b", "headers.X has an invalid reference to a secret"),
        ("Host", "evil.example", "headers.Host must not be set"),
        ("hOsT", "evil.example", "headers.hOsT must not be set"),
        ("Idempotency-Key", "x", "must not be set: FairQueue sets it"),
        ("Content-Length", "1", "must not be set"),
        ("Transfer-Encoding", "chunked", "must not be set"),
        ("Connection", "upgrade", "must not be set"),
        ("Upgrade", "websocket", "must not be set"),
        ("Expect", "100-continue", "must not be set"),
        ("TE", "trailers", "must not be set"),
        ("Accept-Encoding", "gzip", "must not be set"),
        ("FairQueue-Signature", "t=1,v1=0", "must not be set"),
        ("fairqueue-attempt", "1", "must not be set"),
    ],
)
def test_a_header_that_cannot_be_sent_is_named(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        check_request(GOOD | {"headers": {name: value}})


def test_a_header_in_two_spellings_is_refused() -> None:
    with pytest.raises(InvalidPayload, match=r"headers\.x-a is set twice"):
        check_request(GOOD | {"headers": {"X-A": "1", "x-a": "2"}})


@pytest.mark.parametrize(
    "payload",
    [
        {"url": "https://bob:hunter2@h.example/"},
        {"url": "ftp://bob:hunter2@h.example/"},
        {"url": "https://bob:hunter2@h.example:x/"},
        GOOD | {"headers": {"Authorization": "Bearer hunter2\n"}},
        GOOD | {"headers": {"Authorization": ["hunter2"]}},
        {"url": ["https://bob:hunter2@h.example/"]},
        {"url": {"https://h.example/": "hunter2"}},
        GOOD | {"method": ["hunter2"]},
    ],
)
def test_a_password_in_a_bad_request_is_not_repeated(payload: dict[str, Any]) -> None:
    with pytest.raises(InvalidPayload) as caught:
        check_request(payload)
    assert "hunter2" not in str(caught.value)


@given(st.text(alphabet="0123456789abx.:/[]@%\\?#-_ 。é１٠\ud800\u200d", max_size=30))
@example("[")
def test_any_text_in_a_url_is_accepted_or_refused_as_a_payload(text: str) -> None:
    with suppress(InvalidPayload):
        check_request({"url": "https://" + text})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"allow_private": "10.0.0.0/8"},
            "allow_private must be a list of networks and hosts, not a str",
        ),
        ({"allow_private": [5]}, "allow_private must contain strings, not 5"),
        ({"allow_private": ["10.0.0.1/8"]}, "'10.0.0.1/8', which is not a network"),
        ({"allow_private": ["https://h.example"]}, "which is not a network"),
        ({"allow_private": ["bob@h.example"]}, "networks such as .* not 'bob@h.example'"),
        ({"allow_private": ["h.example:x"]}, "networks such as .* not 'h.example:x'"),
        ({"allow_private": ["h.example:70000"]}, "port must .*not 70000"),
        ({"allow_private": ["*.example"]}, r"the host '\*.example'"),
        ({"allow_private": [""]}, "the host ''"),
        ({"allow_private": ["127.1"]}, "the host '127.1': an IPv4 address must be"),
        ({"timeout": 0}, "timeout must be .* seconds, not 0"),
        ({"max_body": -1}, "max_body must .*not -1"),
        ({"max_body": RESULT_BODY_BYTES + 1}, f"from 0 to {RESULT_BODY_BYTES}"),
        ({"ssl_context": ssl._create_unverified_context()}, "ssl_context must check host names"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HttpTasks(**settings)


def test_a_secret_that_is_passed_instead_of_its_reference_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError, match="signing_secret must be a reference") as caught:
        HttpTasks(signing_secret="hunter2")
    assert "hunter2" not in str(caught.value)


# --- the module and its page ----------------------------------------------------------------------


def run_python(program: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | variables,
    )


def test_without_httpx_the_import_says_what_to_install() -> None:
    done = run_python("import sys; sys.modules['httpx'] = None; import fairqueue.http_tasks.http")
    assert "ImportError: fairqueue.http needs httpx" in done.stderr
    assert "pip install 'fairqueue[http]'" in done.stderr


PAGE = ROOT / "docs" / "http-tasks.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("example", "output"),
    list(zip(EXAMPLES, ["200 {'ok': True}\n", "True False\n", "True False\n"], strict=True)),
    ids=["a task", "the receiver", "the receiver without the library"],
)
def test_the_examples_of_the_page_work(example: str, output: str) -> None:
    done = run_python(example)
    assert (done.stdout, done.returncode) == (output, 0), done.stderr
