"""Secrets come out nowhere: one canary for each of them, and all that comes out is searched.

What counts as coming out: log records of all levels with all their fields, errors with the text of
their tracebacks, reprs, answers of the API, pages, what commands print, metrics, the audit log, the
history, and what is stored. A secret in a payload is stored, as it has to be, but not shown.
"""

import base64
import json
import logging
import socket
import ssl
import threading
import traceback
import tracemalloc
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import redis
from helpers.browser import Site, Web
from helpers.commands import Cli
from helpers.fixtures import OwnServer
from helpers.tasks import make_task
from helpers.waiting import eventually
from helpers.world import World
from prometheus_client import CollectorRegistry, generate_latest

from fairqueue import Alerts, Claim, FairQueueError, History, TaskQueue, TaskScheduler, Worker
from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.alerts import Alert, AlertNotSent, EmailRecipient, WebhookRecipient
from fairqueue.cli.logs import TextFormatter
from fairqueue.http_tasks.http import HttpTasks, SecretRequest
from fairqueue.http_tasks.requests import check_request
from fairqueue.inspection import Inspector
from fairqueue.inspection.masking import mask, unmask
from fairqueue.logs import JsonFormatter
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.web.api.endpoint import PREFIX
from fairqueue.web.api.endpoints import ENDPOINTS

STRICT = ssl.create_default_context()
JSON = {"Accept": "application/json"}
HTML = {"Accept": "text/html"}


class Ears:
    """Keeps all that comes out, with where it did."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)  # of all loggers, those of other libraries too
        self._caplog = caplog
        self._heard: list[tuple[str, str]] = []

    def hear(self, where: str, *things: object) -> None:
        """Keep things as they would be printed; of errors also the traceback."""
        for thing in things:
            self._heard += [(where, str(thing)), (f"repr, {where}", repr(thing))]
            if isinstance(thing, BaseException):
                lines = traceback.format_exception(thing)
                self._heard.append((f"traceback, {where}", "".join(lines)))

    @contextmanager
    def failing(self, where: str) -> Iterator[None]:
        """Keep the error that has to come."""
        with pytest.raises((FairQueueError, OSError)) as caught:
            yield
        self.hear(where, caught.value)

    def found(self, secret: str) -> list[str]:
        """Where a secret came out, in any spelling."""
        spellings = {secret, urllib.parse.quote(secret, safe=""), json.dumps(secret)[1:-1]}
        spellings |= {base64.b64encode(secret.encode()).decode().rstrip("=")[:-1]}
        return [
            f"{where}: {text[:500]}"
            for where, text in (*self._heard, *self._logged())
            if any(spelling in text for spelling in spellings)
        ]

    def _logged(self) -> Iterator[tuple[str, str]]:
        formatters = (TextFormatter(), JsonFormatter())
        for record in self._caplog.records:
            yield f"log of {record.name}", repr(vars(record))
            for formatter in formatters:
                with suppress(TypeError, ValueError):
                    yield f"log line of {record.name}", formatter.format(record)


@pytest.fixture
def ears(caplog: pytest.LogCaptureFixture) -> Ears:
    return Ears(caplog)


def test_the_ears_hear(ears: Ears) -> None:
    """What proves the other tests."""
    secret = "canary/one"
    logging.getLogger("anything").debug("quiet", extra={"field": {"deep": secret}})
    assert len(ears.found(secret)) >= 1
    ears.hear("a URL", f"?x={urllib.parse.quote(secret, safe='')}")
    ears.hear("a header", base64.b64encode(secret.encode()))
    try:
        try:
            raise OSError(secret)
        except OSError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        ears.hear("an error", error)
    places = {found.partition(":")[0] for found in ears.found(secret)}
    assert {"a URL", "a header", "traceback, an error"} <= places


# --- the password of Redis ------------------------------------------------------------------------

PASSWORD = "cnry-redis-5d41"
READS = [
    "status",
    "stats",
    "doctor",
    "settings",
    "users list",
    "workers list",
    "schedules list",
    "runs list",
    "failed list",
    "audit",
    "keys list",
]


def locked(own_server: OwnServer, password: str = PASSWORD) -> EmbeddedServer:
    """A server that knows a user `ops` with this password, and nobody else."""
    server = own_server()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "ops", "on", f">{password}", "~*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "off")
    return server


def url_of(server: EmbeddedServer, password: str = PASSWORD) -> str:
    return server.url.replace("unix://", f"unix://ops:{password}@")


def hear_cli(ears: Ears, url: str, *options: str) -> list[int]:
    codes = []
    for line in READS:
        done = Cli(url).run(*line.split(), *options)
        ears.hear(f"fairqueue {line}", done.out, done.err)
        codes.append(done.code)
    return codes


def test_the_password_of_redis_shows_nowhere(own_server: OwnServer, ears: Ears) -> None:
    server = locked(own_server)
    registry = CollectorRegistry()
    with TaskQueue.from_url(url_of(server)) as queue:
        scheduler = TaskScheduler(queue, "one", registry=registry)
        worker = Worker(queue, lambda task: None, registry=registry)
        queue.push(make_task(task_id="t"))
        scheduler.start()
        worker.start()
        ears.hear("objects", queue, queue.link, scheduler, worker, vars(queue), vars(scheduler))
        ears.hear("states", scheduler.health(), queue.inspect(), queue.settings())
        ears.hear("inspector", Inspector(queue), Inspector(queue).system.redis())
        eventually(lambda: History(queue).runs(status=["succeeded"]), "the end of the task")
        assert worker.stop()
        assert scheduler.stop()
        ears.hear("metrics", generate_latest(registry))
    assert hear_cli(ears, url_of(server), "--log-level", "debug").count(0) > len(READS) - 2
    hear_cli(ears, url_of(server), "-o", "json", "--log-format", "json")
    done = Cli("redis://localhost:1").run("status", "--url", url_of(server))
    ears.hear("--url", done.out, done.err)
    assert done.code == 0
    assert ears.found(PASSWORD) == []


def test_a_password_that_redis_refuses_shows_nowhere(own_server: OwnServer, ears: Ears) -> None:
    url = url_of(locked(own_server, "another"))
    queue = TaskQueue.from_url(url)
    with ears.failing("push"):
        queue.push(make_task())
    with ears.failing("scheduler"):
        TaskScheduler(queue, registry=CollectorRegistry())
    with ears.failing("health"):
        Inspector(queue).system.overview()
    with ears.failing("worker"):
        Worker(queue, lambda task: None, registry=CollectorRegistry()).run_once()
    assert 0 not in hear_cli(ears, url)
    assert ears.found(PASSWORD) == []


@pytest.mark.parametrize(
    "url",
    [
        f"redis://ops:{PASSWORD}@127.0.0.1:1/0",
        f"redis://:{PASSWORD}@127.0.0.1:1/0",
        f"rediss://ops:{PASSWORD}@127.0.0.1:1/0",
        f"redis://127.0.0.1:1/0?username=ops&password={PASSWORD}",
        f"unix://ops:{PASSWORD}@/nowhere/redis.sock",
        f"redis+sentinel://ops:{PASSWORD}@127.0.0.1:1,127.0.0.1:2/main/0",
        f"redis+sentinel://127.0.0.1:1/main/0?sentinel_username=s&sentinel_password={PASSWORD}",
        f"rediss+sentinel://ops:{PASSWORD}@127.0.0.1:1/main?sentinel_password={PASSWORD}",
    ],
)
def test_the_password_of_a_redis_that_is_not_there_shows_nowhere(url: str, ears: Ears) -> None:
    queue = TaskQueue.from_url(url, timeout=0.1)
    ears.hear("objects", queue, queue.link, vars(queue), vars(queue.link))
    with ears.failing("push"):
        queue.push(make_task())
    with ears.failing("scheduler"):
        TaskScheduler(queue, registry=CollectorRegistry())
    assert ears.found(PASSWORD) == []


@pytest.mark.parametrize(
    "url",
    [
        f"redis://ops:{PASSWORD}@127.0.0.1:port/0",
        f"redis://ops:{PASSWORD}@127.0.0.1:99999/0",
        f"redis://ops:{PASSWORD}@[::1/0",
        f"redis://ops:a/{PASSWORD}@127.0.0.1/0",
        f"redis://ops:a#{PASSWORD}@127.0.0.1/0",
        f"redis://ops:a?{PASSWORD}@127.0.0.1/0",
        f"redis://ops:a@{PASSWORD}@127.0.0.1:port/0",
        f"redis://ops:{PASSWORD}@127.0.0.1:6379/zero",
        f"redis://127.0.0.1:port/0?password={PASSWORD}",
        f"redis://127.0.0.1/0?password={PASSWORD}&socket_timeout=soon",
        f"http://ops:{PASSWORD}@127.0.0.1/",
        f"redis//ops:{PASSWORD}@127.0.0.1",
        f"redis+sentinel://ops:{PASSWORD}@/main",
        f"redis+sentinel://ops:{PASSWORD}@127.0.0.1:port/main",
        f"redis+sentinel://ops:{PASSWORD}@127.0.0.1:1",
        f"redis+sentinel://127.0.0.1:port/main?sentinel_password={PASSWORD}",
        f"redis+sentinels://ops:{PASSWORD}@127.0.0.1:1/main",
        f"redis://:{PASSWORD}:6379",
        f"redis://ops:{PASSWORD}",
        f"redis+sentinel://ops:{PASSWORD}",
        f"redis://127.0.0.1/0?PASSWORD={PASSWORD}",
    ],
)
def test_the_password_in_a_url_that_is_none_shows_nowhere(url: str, ears: Ears) -> None:
    """Where it is not told at once, it is where the first connection is made."""
    try:
        queue = TaskQueue.from_url(url, timeout=0.1)
        queue.check()
    except FairQueueError as error:
        ears.hear("from_url", error)
    else:
        pytest.fail("a queue was made")
    done = Cli(url).run("status")
    ears.hear("fairqueue status", done.out, done.err)
    assert done.code != 0
    assert ears.found(PASSWORD) == []


# --- API keys and sessions ------------------------------------------------------------------------


def paths_of(**ids: str) -> list[str]:
    """The paths of all operations of the API that read something."""
    reading = [operation.path for operation in ENDPOINTS if operation.method == "GET"]
    span = "start=2023-11-01T00:00:00Z&end=2023-12-01T00:00:00Z"
    more = {"/moments": f"?{span}", "/preview": "?cron_expr=0+9+*+*+*"}
    return [
        f"{PREFIX}{path.format(**ids)}{more.get('/' + path.rpartition('/')[2], '')}"
        for path in reading
    ]


PAGES = [
    "/",
    "/schedules",
    "/runs",
    "/failed",
    "/failed/export",
    "/users",
    "/workers",
    "/audit",
    "/settings",
    "/search?q=s",
    "/new/schedule",
]


def hear_site(ears: Ears, site: Site, headers: dict[str, str], *more: str, **ids: str) -> None:
    """Ask for everything that the site shows."""
    for path in (*paths_of(**ids), *PAGES, *more):
        kind = JSON if path.startswith(PREFIX) else HTML
        answer = site.http.get(path, headers={**kind, **headers})
        assert answer.status_code in (200, 404, 503), (path, answer.text)
        ears.hear(path, answer.text, answer.headers)


IDS = {
    "schedule_id": "s",
    "task_id": "t",
    "user_id": "ann",
    "worker_id": "w",
    "name": "mail",
    "key_id": "0123456789abcdef",
    "tenant": "acme",
}


def test_a_keys_secret_shows_only_once(web: Web, world: World, redis_url: str, ears: Ears) -> None:
    site = web(auth=True, rate=1e6, burst=1_000_000)
    made = AccessStore(world.queue.link).create_key("ann", "admin", by="test")
    ears.hear("the new key", made, made.info)
    admin = {"Authorization": f"Bearer {made.secret}"}
    answer = site.http.post(
        f"{PREFIX}/keys",
        json={"name": "bo", "role": "operator"},
        headers={**admin, "Idempotency-Key": "one"},
    )
    other = answer.json()["secret"]  # told this once
    ears.hear(
        "asked again",
        site.http.post(
            f"{PREFIX}/keys",
            json={"name": "bo", "role": "operator"},
            headers={**admin, "Idempotency-Key": "one"},
        ).text,
    )
    printed = Cli(redis_url).ok("keys", "create", "cy").out.strip()  # and this
    hear_site(ears, site, admin, **IDS)
    hear_cli(ears, redis_url)
    hear_cli(ears, redis_url, "-o", "json")
    ears.hear("Redis", world.dump())
    for secret in (made.secret, other, printed):
        assert ears.found(secret) == []
        assert ears.found(secret.split("_", 2)[2]) == []  # nor the part that is secret


def test_a_credential_that_is_refused_is_not_repeated(web: Web, ears: Ears) -> None:
    site = web(auth=True)
    wrong = f"fq_0123456789abcdef_{'cnry-key-8a2b' * 4}"[:63]
    for headers in (
        {"Authorization": f"Bearer {wrong}"},
        {"Authorization": f"Basic {wrong}"},
        {"Authorization": wrong},
        {"Cookie": f"fairqueue_session={wrong}"},
        {"X-Api-Key": wrong},
    ):
        for path, kind in ((f"{PREFIX}/keys", JSON), ("/settings", HTML)):
            answer = site.http.get(path, headers={**kind, **headers})
            assert answer.status_code in (303, 401)
            ears.hear(f"{path} with {list(headers)}", answer.text, answer.headers)
    answer = site.http.post("/login", data={"secret": wrong}, headers=HTML)
    assert answer.status_code == 401
    ears.hear("login", answer.text, answer.headers)
    assert ears.found(wrong) == []


def test_sessions_and_one_time_links_show_nowhere_but_in_their_cookie(
    web: Web, world: World, redis_url: str, ears: Ears, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "httpcore")  # of the test's own client: it logs all of it
    caplog.set_level(logging.WARNING, "httpx")
    site = web(auth=True, rate=1e6, burst=1_000_000)
    link = AccessStore(world.queue.link).create_login(Actor(name="ann"))
    site.http.get(f"/login?token={link}", headers=HTML)  # it is in the form of this page
    answer = site.http.post("/login", data={"secret": link}, headers=HTML)
    session = answer.cookies["fairqueue_session"]
    ears.hear("the answer", answer.text)
    site.http.cookies.clear()
    hear_site(ears, site, {"Cookie": f"fairqueue_session={session}"}, **IDS)
    hear_cli(ears, redis_url)
    ears.hear("Redis", world.dump())
    assert ears.found(session) == []
    assert ears.found(link) == []


# --- HTTP tasks -----------------------------------------------------------------------------------


class _Echo(BaseHTTPRequestHandler):
    """Answers with all that it was sent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = f"{self.path} {self.headers}".encode()
        self.send_response(int(self.path.strip("/").partition("?")[0] or 200))
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_secrets_by_reference_show_nowhere(
    world: World, redis_url: str, web: Web, echo: str, ears: Ears
) -> None:
    """The values are only in the request; what is stored and shown has their names."""
    values = {"API": "cnry-http-3e9f", "SIGN": "cnry-sign-77aa"}

    def vault(wanted: SecretRequest) -> str | None:
        if wanted.name == "AWAY":
            raise OSError(f"the vault said {values['API']}")
        return values.get(wanted.name)

    tasks = HttpTasks(
        allow_private=["127.0.0.0/8"],
        allow_http=True,
        secrets=vault,
        signing_secret="secret:SIGN",
        ssl_context=STRICT,
    )
    worker = Worker(world.queue, registry=CollectorRegistry(), capture_logs=True)
    tasks.register(worker, retries=0)
    for number, (path, name) in enumerate(
        [("200", "API"), ("404", "API"), ("503", "API"), ("200", "AWAY"), ("200", "NONE")]
    ):
        headers = {"Authorization": f"Bearer secret:{name}", "X-Other": "secret:API"}
        payload = {"url": f"{echo}/{path}", "headers": headers}
        world.queue.push(make_task(task_id=f"t{number}", name="http", payload=payload))
    assert worker.run_until_empty() == 5
    done = world.info("t0")
    assert "Authorization: Bearer ***" in done.result["body"]  # it was sent, and came back
    ears.hear("objects", tasks, vars(tasks), worker)
    ears.hear(
        "history",
        *History(world.queue).runs(),
        *(History(world.queue).get(f"t{n}") for n in range(5)),
    )
    ears.hear("Redis", world.dump())
    for number in range(5):
        ears.hear("fairqueue", Cli(redis_url).ok("runs", "show", f"t{number}").out)
    hear_site(ears, web(), {}, "/runs/t0", "/runs/t1", **{**IDS, "task_id": "t1"})
    for value in values.values():
        assert ears.found(value) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"signing_secret": "cnry-sign-77aa"},
        {"signing_secret": "secret: cnry-sign-77aa"},
        {"signing_secret": b"cnry-sign-77aa"},
    ],
    ids=str,
)
def test_a_plain_signing_secret_is_not_repeated(settings: dict[str, Any], ears: Ears) -> None:
    with ears.failing("HttpTasks"):
        HttpTasks(ssl_context=STRICT, **settings)
    assert ears.found("cnry-sign-77aa") == []


TOKEN = "cnry-url-b7c1"


@pytest.mark.parametrize(
    "payload",
    [
        {"url": f"https://ann:{TOKEN}@api.example/"},
        {"url": f"ftp://ann:{TOKEN}@api.example/"},
        {"url": f"ftp://api.example/?token={TOKEN}"},
        {"url": f"https:api.example/?token={TOKEN}"},
        {"url": f"https://api.example:99999/hooks/{TOKEN}"},
        {"url": f"https://api.example:0/hooks/{TOKEN}"},
        {"url": f"https://[::1/hooks/{TOKEN}"},
        {"url": f"https://a..b/hooks/{TOKEN}"},
        {"url": f"https://0x7f.1/hooks/{TOKEN}"},
        {"url": f"https://api.example/\x00?{TOKEN}"},
        {"url": f"/{TOKEN}"},
        {"url": "https://api.example/", "headers": {"Authorization": f"Bearer {TOKEN}\n"}},
        {"url": "https://api.example/", "headers": {"Authorization": f"Bearer {TOKEN}é"}},
        {"url": "https://api.example/", "headers": {"Authorization": [TOKEN]}},
        {"url": "https://api.example/", "headers": f"Authorization: Bearer {TOKEN}"},
        {"url": "https://api.example/", "headers": [["Authorization", f"Bearer {TOKEN}"]]},
        {"url": "https://api.example/", "headers": {"Authorization": f"secret:{TOKEN}!"}},
        {"url": "https://api.example/", "method": "GET", "json": {"password": TOKEN}},
    ],
    ids=lambda payload: repr(payload).replace(TOKEN, "TOKEN"),
)
def test_a_request_that_is_none_is_refused_without_its_secrets(
    queue: TaskQueue, payload: dict[str, Any], ears: Ears
) -> None:
    with ears.failing("check_request"):
        check_request(payload)
    worker = Worker(queue, registry=CollectorRegistry())
    HttpTasks(ssl_context=STRICT).register(worker)
    queue.push(make_task(task_id="t", name="http", payload=payload))
    assert worker.run_once() == 1
    ears.hear("history", History(queue).get("t"), queue.get("t"))
    assert ears.found(TOKEN) == []


@pytest.mark.parametrize("place", ["hooks/{}", "?token={}", "hooks?a=b#{}"])
def test_a_failed_calls_token_shows_nowhere(queue: TaskQueue, place: str, ears: Ears) -> None:
    with socket.socket() as taken:  # nobody else gets the port, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/{place.format(TOKEN)}"
        for allowed in ((), ("127.0.0.1",)):
            worker = Worker(queue, registry=CollectorRegistry())
            HttpTasks(allow_private=allowed, allow_http=True, ssl_context=STRICT).register(
                worker, retries=0
            )
            task_id = queue.push(make_task(name="http", payload={"url": url}))
            assert worker.run_once() == 1
            ears.hear("history", History(queue).get(task_id), queue.get(task_id))
    assert ears.found(TOKEN) == []


# --- who is told of alerts ------------------------------------------------------------------------

SECRETS = {
    "path": "cnry-path-10aa",
    "header": "cnry-header-20bb",
    "sign": "cnry-sign-30cc",
    "smtp": "cnry-smtp-40dd",
}


def test_the_secrets_of_recipients_show_nowhere(echo: str, ears: Ears) -> None:
    webhook = WebhookRecipient(
        f"{echo}/500?token={SECRETS['path']}",
        headers={"Authorization": f"Bearer {SECRETS['header']}"},
        secret=SECRETS["sign"],
        allow_http=True,
        context=STRICT,
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        mail = EmailRecipient(
            host="127.0.0.1",
            port=taken.getsockname()[1],
            sender="a@example.org",
            to=["b@example.org"],
            username="ann",
            password=SECRETS["smtp"],
            context=STRICT,
        )
        alert = Alert(kind="task_failed", summary="something")
        for recipient in (webhook, mail):
            with pytest.raises(AlertNotSent) as caught:
                recipient.send(alert)
            ears.hear("send", caught.value, recipient, recipient.name)
        registry = CollectorRegistry()
        with Alerts([webhook, mail], registry=registry) as alerts:
            ears.hear("alerts", alerts)
            alerts.raise_(alert)
            alerts.close(10)
        ears.hear("metrics", generate_latest(registry))
    assert {name: found for name, each in SECRETS.items() if (found := ears.found(each))} == {}


def _answer_smtp(server: socket.socket, login: list[str]) -> None:
    """A server that offers no encryption, and one that repeats what it is told."""
    connection, _ = server.accept()
    with connection, connection.makefile("rwb") as lines:
        lines.write(b"220 here\r\n")
        lines.flush()
        for line in lines:
            login.append(line.decode())
            lines.write(b"502 what is " + line)
            lines.flush()


def test_a_mail_server_without_encryption_never_gets_the_password(ears: Ears) -> None:
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_smtp, args=(server, told))
        thread.start()
        recipient = EmailRecipient(
            host="127.0.0.1",
            port=server.getsockname()[1],
            sender="a@example.org",
            to=["b@example.org"],
            username="ann",
            password=SECRETS["smtp"],
            context=STRICT,
        )
        with pytest.raises(AlertNotSent) as caught:
            recipient.send(Alert(kind="task_failed", summary="something"))
        thread.join(30)
    ears.hear("send", caught.value)
    ears.hear("what the server was told", told)
    assert told
    assert ears.found(SECRETS["smtp"]) == []


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (WebhookRecipient, {"url": f"http://h.example/{TOKEN}"}),
        (WebhookRecipient, {"url": f"https://ann:{TOKEN}@h.example/"}),
        (WebhookRecipient, {"url": f"https://h.example:port/{TOKEN}"}),
        (WebhookRecipient, {"url": f"https://h.example/ {TOKEN}"}),
        (WebhookRecipient, {"url": f"/{TOKEN}"}),
        (WebhookRecipient, {"url": "https://h.example/", "headers": {"A": f"{TOKEN}\n"}}),
        (WebhookRecipient, {"url": "https://h.example/", "secret": [TOKEN]}),
        (EmailRecipient, {"password": f"{TOKEN}é", "username": "ann"}),
        (EmailRecipient, {"password": TOKEN, "username": "ann", "tls": "none"}),
        (EmailRecipient, {"password": TOKEN}),
        (EmailRecipient, {"password": [TOKEN], "username": "ann"}),
    ],
    ids=lambda value: repr(value).replace(TOKEN, "TOKEN") if isinstance(value, dict) else None,
)
def test_what_is_wrong_with_a_recipient_is_said_without_its_secrets(
    kind: Any, wrong: dict[str, Any], ears: Ears
) -> None:
    usual: dict[str, Any] = {"context": STRICT}
    if kind is EmailRecipient:
        usual |= {"host": "h.example", "sender": "a@example.org", "to": ["b@example.org"]}
    with ears.failing("constructor"):
        kind(**usual | wrong)
    assert ears.found(TOKEN) == []


# --- payloads -------------------------------------------------------------------------------------

PAYLOAD_SECRETS = {
    "Authorization": "cnry-authorization-01",
    "password": "cnry-password-02",
    "deep": "cnry-deep-03",
    "user": "cnry-user-04",
    "query": "cnry-query-05",
    "metadata": "cnry-metadata-06",
    "new": "cnry-new-07",
    "result": "cnry-result-08",
    "local": "cnry-local-09",
}


def payload_with(secrets: dict[str, str]) -> dict[str, Any]:
    return {
        "url": f"https://ann:{secrets['user']}@api.example/v1?api_key={secrets['query']}&n=1",
        "headers": {"Authorization": f"Bearer {secrets['Authorization']}"},
        "json": {"password": secrets["password"], "rows": [{"private_key": secrets["deep"]}]},
    }


def failing_handler(payload: dict[str, Any]) -> None:
    """Has a secret among its variables when it fails."""
    credential = PAYLOAD_SECRETS["local"]
    if len(credential) > 1:
        raise ValueError("no such mailbox")


def test_secrets_show_nowhere(world: World, redis_url: str, web: Web, ears: Ears) -> None:
    payload = payload_with(PAYLOAD_SECRETS)
    metadata = {"api_key": PAYLOAD_SECRETS["metadata"]}
    rule: dict[str, Any] = {"every": 60, "user_id": "ann", "schedule_id": "s", "name": "mail"}
    world.scheduler.add_schedule(payload=payload, metadata=metadata, **rule)
    world.scheduler.update_schedule(
        "s", payload={"token": PAYLOAD_SECRETS["new"]}, changed_by="ann"
    )
    world.scheduler.update_schedule("s", payload=payload, changed_by="ann")
    registry = CollectorRegistry()
    worker = Worker(world.queue, registry=registry, capture_logs=True)
    worker.register("mail", failing_handler, retries=0)
    worker.register("good", lambda payload: {"token": PAYLOAD_SECRETS["result"]})
    task = make_task("ann", "t", name="mail", payload=payload)
    world.queue.push(task)
    world.queue.push(make_task("ann", "good", name="good", payload=payload))
    assert worker.run_until_empty() == 2
    world.queue.push(make_task("ann", "waiting", name="mail", payload=payload, delay=60))
    triggered = world.scheduler.trigger("s", triggered_by="ann")
    (claim,) = world.queue.claim("w")
    assert isinstance(claim, Claim)
    assert claim.task.payload == payload  # whoever runs it gets it whole
    ears.hear("objects", task, claim, claim.task, world.queue.get("waiting"), worker)
    ears.hear("schedules", world.scheduler.get_schedule("s"), world.scheduler.list_schedules())
    ears.hear(
        "history", *History(world.queue).runs(status=["failed"]), History(world.queue).get("t")
    )
    inspector = Inspector(world.queue)
    ears.hear("inspector", inspector.schedules.get("s"), inspector.runs.get("t"))
    ears.hear("changes", *inspector.schedules.changes("s"), *inspector.audit.list())
    inspector.failed.retry("t")
    inspector.schedules.update("s", {"payload": {"token": PAYLOAD_SECRETS["new"]}})
    inspector.schedules.update("s", {"payload": payload})
    ears.hear("audit", *inspector.audit.list())
    ears.hear("metrics", generate_latest(registry))
    pages = ("/runs/t", "/runs/good", "/schedules/s", "/users/ann", f"/runs/{triggered}")
    hear_site(ears, web(), {}, *pages, "/do/schedules/edit?id=s", **IDS)
    hear_site(ears, web(), {}, "/runs/waiting", **{**IDS, "task_id": "good"})
    for line in (*READS, "schedules show s", "schedules changes s", "schedules history s"):
        for options in ((), ("-o", "json")):
            done = Cli(redis_url).run(*line.split(), *options)
            ears.hear(f"fairqueue {line}", done.out, done.err)
    for line in ("runs show t", "runs logs t", "tasks show waiting", "failed show t"):
        ears.hear(f"fairqueue {line}", Cli(redis_url).ok(*line.split()).out)
    ears.hear("fairqueue failed export", Cli(redis_url).ok("failed", "export").out)
    # Exports are for admins, whole: they are what an import takes.
    shown = {name: ears.found(each) for name, each in PAYLOAD_SECRETS.items()}
    exports = (f"{PREFIX}/scheduler/jobs/export", f"repr, {PREFIX}/scheduler/jobs/export")
    kept = {
        name: [found for found in places if not found.startswith(exports)]
        for name, places in shown.items()
    }
    assert {name: places for name, places in kept.items() if places} == {}


@dataclass
class Login:
    """Somebody's own class, which shows all that it has."""

    password: str


# What is no payload at all.
NO_PAYLOADS: dict[str, Any] = {
    "JSON text": json.dumps({"password": PAYLOAD_SECRETS["password"]}),
    "JSON in bytes": json.dumps({"password": PAYLOAD_SECRETS["password"]}).encode(),
    "a list": [{"password": PAYLOAD_SECRETS["password"]}, PAYLOAD_SECRETS["password"]],
    "pairs": (("token", PAYLOAD_SECRETS["password"]),),
    "an object": Login(PAYLOAD_SECRETS["password"]),
}
BAD_VALUES: dict[str, Any] = {
    "bytes": {"password": PAYLOAD_SECRETS["password"].encode()},
    "a set": {"headers": {"Authorization": {PAYLOAD_SECRETS["password"]}}},
    "no text": {"api_key": PAYLOAD_SECRETS["password"] + "\ud800"},
    "beside it": {"password": PAYLOAD_SECRETS["password"], "when": object()},
    "a key": {"password": PAYLOAD_SECRETS["password"], 7: 7},
    "an object in it": {"config": Login(PAYLOAD_SECRETS["password"])},
    "a set in it": {"config": {("password", PAYLOAD_SECRETS["password"])}},
    "bytes in it": {"body": PAYLOAD_SECRETS["password"].encode()},
    "a tuple as a key": {("password", PAYLOAD_SECRETS["password"]): 1},
    "bytes as a key": {PAYLOAD_SECRETS["password"].encode(): 1},
}
# These are stored as they are where their name says no secret, but errors do not repeat them.
NO_TEXTS: dict[str, Any] = {
    "no text in a list": {"items": [f"Bearer {PAYLOAD_SECRETS['password']}\ud800"]},
    "no text as a key": {f"{PAYLOAD_SECRETS['password']}\ud800": 1},
}


@pytest.mark.parametrize("kind", NO_PAYLOADS | BAD_VALUES | NO_TEXTS)
def test_a_payload_that_is_refused_is_not_repeated(world: World, kind: str, ears: Ears) -> None:
    payload = (NO_PAYLOADS | BAD_VALUES | NO_TEXTS)[kind]
    with ears.failing("Task.create"):
        make_task(payload=payload)
    with ears.failing("add_schedule"):
        world.scheduler.add_schedule("0 9 * * *", "ann", payload=payload)
    with ears.failing("add_schedule"):
        world.scheduler.add_schedule("0 9 * * *", "ann", metadata=payload)
    world.scheduler.add_schedule("0 9 * * *", "ann", schedule_id="s")
    with ears.failing("update_schedule"):
        world.scheduler.update_schedule("s", payload=payload)
    with ears.failing("trigger"):
        world.scheduler.trigger("s", payload=payload)
    with ears.failing("import_schedules"):
        world.scheduler.import_schedules(
            [{"schedule_id": "x", "user_id": "ann", "payload": payload}]
        )
    assert ears.found(PAYLOAD_SECRETS["password"]) == []


@pytest.mark.parametrize("kind", NO_PAYLOADS | BAD_VALUES)
def test_a_refused_payload_is_not_audited(queue: TaskQueue, kind: str, ears: Ears) -> None:
    payload = (NO_PAYLOADS | BAD_VALUES)[kind]
    inspector = Inspector(queue)
    rule: dict[str, Any] = {"cron_expr": "0 9 * * *", "user_id": "ann"}
    inspector.schedules.add(**rule, schedule_id="s")
    refused: dict[str, Callable[[], object]] = {
        "add a payload": lambda: inspector.schedules.add(**rule, payload=payload),
        "add metadata": lambda: inspector.schedules.add(**rule, metadata=payload),
        "add a user": lambda: inspector.schedules.add(**rule | {"user_id": payload}),
        "add an id": lambda: inspector.schedules.add(**rule, schedule_id=payload),
        "add a tenant": lambda: inspector.schedules.add(**rule, tenant=payload),
        "update": lambda: inspector.schedules.update("s", {"payload": payload}),
        "copy": lambda: inspector.schedules.copy("s", None, payload=payload),
        "trigger": lambda: inspector.schedules.trigger("s", payload=payload),
        "bulk": lambda: inspector.schedules.bulk(
            "update", dry_run=False, changes={"payload": payload}
        ),
    }
    # A text is a name that was chosen badly, and names are shown.
    skipped = ("user", "id", "tenant") if kind == "JSON text" else ()
    for where, call in refused.items():
        if not where.endswith(skipped):
            with ears.failing(where):
                call()
    entries = inspector.audit.list()
    assert len(entries) > 5
    ears.hear("audit", *entries)
    assert ears.found(PAYLOAD_SECRETS["password"]) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://h.example/?token=abc", "https://h.example/?token=***"),
        ("https://h.example/?a=1&api_key=abc&b=2#x", "https://h.example/?a=1&api_key=***&b=2#x"),
        ("https://h.example/?a=1&b=2", "https://h.example/?a=1&b=2"),
        ("https://h.example/?X-Amz-Signature=abc", "https://h.example/?X-Amz-Signature=***"),
        ("https://h.example/?token=", "https://h.example/?token="),
        ("https://u:p@h.example/?token=abc", "https://***@h.example/?token=***"),
        (
            "see https://h.example/?token=abc and so on",
            "see https://h.example/?token=*** and so on",
        ),
        ("is it so? token=abc", "is it so? token=abc"),  # no URL
        ("/cb?token=abc", "/cb?token=***"),
        ("https://h.example/?%74oken=abc", "https://h.example/?%74oken=***"),
        ("https://h.example/cb#access_token=abc&x=1", "https://h.example/cb#access_token=***&x=1"),
        ("https://h.example/c?sv=1&sig=abc", "https://h.example/c?sv=1&sig=***"),
        ("https://h.example/?a=1;token=abc", "https://h.example/?a=1;token=***"),
        ("https://h.example/a;token=abc", "https://h.example/a;token=***"),
        ("postgres://u:p/w@h.example/db", "postgres://***@h.example/db"),
        ("postgres://u:p/w@p@h.example/db", "postgres://***@h.example/db"),
        ("postgres://u:8/w@h.example/db?a=b@c", "postgres://u:8/w@h.example/db?a=b@c"),  # a port
        ("https://h.example:8080/@me", "https://h.example:8080/@me"),
        ("//u:pw@h.example/", "//***@h.example/"),
        ("Server=h;Password=abc", "Server=h;Password=***"),
        ("Server=h; Password='a;b'; Port=1", "Server=h; Password=***; Port=1"),
        ("AccountName=a;AccountKey=abc==;E=1", "AccountName=a;AccountKey=***;E=1"),
        ("A=1\nPASSWORD=a b c\nB=2", "A=1\nPASSWORD=***\nB=2"),
        ("Password=;Server=h", "Password=;Server=h"),
    ],
)
def test_secrets_in_the_query_of_a_url_are_masked_and_kept_by_an_edit(
    value: str, shown: str
) -> None:
    assert mask({"url": value}) == {"url": shown}
    assert unmask({"url": shown}, {"url": value}) == {"url": value}


REPEATED = [
    *("?", "?token=&", "&a", "?token=", "?a=", "//", "//a:", "//a:b", "//a:/", "//a@b:c", "//u:p@"),
    *(
        ";",
        "; ",
        ";password=",
        ";password= ",
        ";password='",
        ";password=\"a;password='",
        "\na",
        "=",
    ),
    *(f"?{'a' * 99}", f";{'a' * 99}", f"?{'a' * 101}=", "%74=", "key", "aA", "_", "9"),
]


@pytest.mark.parametrize("part", REPEATED)
def test_masking_a_long_text_takes_no_time(part: str) -> None:
    """It ends: no pattern goes over the same text again and again."""
    text = part * (256 * 1024 // len(part))
    for value in (text, f"//{text}", f"//a:{text}", f";password={text}", f"?token={text}"):
        shown = mask({"text": value, value: 1})
        assert unmask(shown, {"text": value, value: 1}) == {"text": value, value: 1}


@pytest.mark.parametrize(
    "name",
    [
        *("password", "passWord", "passwd", "pass", "pass2", "passphrase", "passcode", "pwd"),
        *("db_pw", "auth", "x-auth", "basicAuth", "oauth", "jwt", "otp", "otp_code", "pin", "PIN"),
        *("userPin", "key", "keys", "api_key", "api_keys", "apikey", "apiKeys", "APIKey", "AWSKey"),
        *("signing_keys", "sshkey", "privkey", "encryptionkey", "accountKey", "sas", "sig"),
        *("connection_string", "connectionString", "session-id", "tokenizer", "creds"),
    ],
)
def test_a_value_whose_name_is_that_of_a_secret_is_masked(name: str) -> None:
    assert mask({name: "abc", "deep": [{name: 7}]}) == {name: "***", "deep": [{name: "***"}]}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "author",
            "authors",
            "authority",
            "opinion",
            "spin",
            "pinned",
            "keyboard",
            "monkey",
            "limit_keys",
        ),
        *("turkey", "depot", "signal", "design", "sassy", "to", "key_count"),
    ],
)
def test_a_value_whose_name_only_looks_like_that_of_a_secret_is_shown(name: str) -> None:
    assert mask({name: "abc"}) == {name: "abc"}


def test_long_names_are_not_kept_in_memory() -> None:
    mask({"short": 1})
    tracemalloc.start()
    try:
        for number in range(20):
            mask({f"{number}{'x' * 100_000}": 1})
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
