"""HTTP tasks are looked at when they are made: what no worker would send is refused at once."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from helpers.rest import Api, Client, make_api, make_app
from helpers.world import World

from fairqueue.errors import InvalidPayload, InvalidSchedule
from fairqueue.http_tasks import checks as outgoing
from fairqueue.http_tasks import network
from fairqueue.http_tasks.http import HttpTasks
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.worker import Worker

INSIDE = "https://169.254.169.254/latest"
PUBLIC = "https://93.184.216.34/hook"
RULE = {"cron_expr": "0 9 * * *", "user_id": "acme-ann"}

Lookup = Callable[[str], list[str]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The hosts that can be looked up; others cannot."""
    known: dict[str, list[str]] = {}

    def look_up(host: str) -> list[str]:
        if host not in known:
            raise socket.gaierror(f"no {host}")
        return known[host]

    monkeypatch.setattr(network, "addresses_of", look_up)
    return known


@pytest.fixture
def api(world: World, names: dict[str, list[str]]) -> Api:
    return make_api(world)


def announce(queue: TaskQueue, name: str = "http", **options: Any) -> None:
    """A worker lives that runs HTTP tasks."""
    worker = Worker(queue)
    HttpTasks(**options).register(worker, name)
    worker._heartbeat.beat(())


# What makes a task or a schedule, for REST.
MAKING: dict[str, Callable[[dict[str, Any]], tuple[str, str, Any]]] = {
    "push": lambda p: ("POST", "/tasks", {"user_id": "acme-ann", "name": "http", "payload": p}),
    "create": lambda p: ("POST", "/scheduler/jobs", {**RULE, "name": "http", "payload": p}),
    "put": lambda p: ("PUT", "/scheduler/jobs/acme-daily", {**RULE, "name": "http", "payload": p}),
    "patch": lambda p: ("PATCH", "/scheduler/jobs/acme-daily", {"name": "http", "payload": p}),
    "copy": lambda p: ("POST", "/scheduler/jobs/acme-daily/copy", {"name": "http", "payload": p}),
    "import": lambda p: (
        "POST",
        "/scheduler/jobs/import",
        {
            "documents": [{**RULE, "schedule_id": "new", "name": "http", "payload": p}],
            "dry_run": False,
        },
    ),
    "import a change": lambda p: (
        "POST",
        "/scheduler/jobs/import",
        {
            "documents": [{**RULE, "schedule_id": "acme-daily", "name": "http", "payload": p}],
            "dry_run": False,
        },
    ),
}
BAD_URLS = [
    INSIDE,
    "https://10.0.0.1/",
    "https://[::1]/",
    "http://93.184.216.34/",  # without TLS
    "ftp://93.184.216.34/",
    "https://user:pass@93.184.216.34/",
    "https://inside.example/",
    "not a url",
]


@pytest.mark.parametrize("url", BAD_URLS)
@pytest.mark.parametrize("making", MAKING)
def test_what_no_worker_would_send_is_refused_when_it_is_made(
    api: Api, names: dict[str, list[str]], making: str, url: str
) -> None:
    names["inside.example"] = ["93.184.216.34", "192.168.0.7"]
    before = api.state()
    method, path, body = MAKING[making]({"url": url})
    problem = api.client().refused(422, method, path, json=body)
    assert "payload.url" in problem["detail"]
    assert "pass@" not in problem["detail"]
    assert api.state() == before


@pytest.mark.parametrize("url", [PUBLIC, "https://outside.example/", "https://unknown.example/"])
@pytest.mark.parametrize("making", MAKING)
def test_what_may_be_sent_or_cannot_be_looked_up_is_taken(
    api: Api, names: dict[str, list[str]], making: str, url: str
) -> None:
    names["outside.example"] = ["93.184.216.34"]
    method, path, body = MAKING[making]({"url": url})
    api.client().ok(method, path, json=body)


def test_what_a_living_worker_allows_is_taken(api: Api) -> None:
    client = api.client()
    body = {"user_id": "acme-ann", "name": "http", "payload": {"url": "http://10.1.2.3/"}}
    assert "allow_private=" in client.refused(422, "POST", "/tasks", json=body)["detail"]
    announce(api.world.queue)
    announce(api.world.queue, allow_private=["10.1.0.0/16"], allow_http=True)
    client = fresh_client(api)
    client.ok("POST", "/tasks", json=body)
    body["payload"] = {"url": "https://10.2.0.1/"}
    assert "no live worker" in client.refused(422, "POST", "/tasks", json=body)["detail"]


def test_tasks_of_another_name_are_http_tasks_where_a_worker_says_so(api: Api) -> None:
    body = {"user_id": "acme-ann", "name": "hook", "payload": {"url": INSIDE}}
    api.client().ok("POST", "/tasks", json=body)  # nobody knows what it is
    announce(api.world.queue, "hook")
    again = fresh_client(api)
    again.refused(422, "POST", "/tasks", json=body)


@pytest.mark.parametrize("payload", [{"url": INSIDE}, {"url": "not a url"}, {"url": 7, "n": 1}])
def test_tasks_with_another_handler_are_not_checked(api: Api, payload: dict[str, Any]) -> None:
    body = {"user_id": "acme-ann", "name": "http", "payload": payload}
    api.client().refused(422, "POST", "/tasks", json=body)
    announce(api.world.queue)
    fresh_client(api).refused(422, "POST", "/tasks", json=body)
    worker = Worker(api.world.queue)
    worker.task("http")(lambda payload: None)
    worker._heartbeat.beat(())
    fresh_client(api).ok("POST", "/tasks", json=body)


def fresh_client(api: Api) -> Client:
    """A client of another process, which has read nothing of workers yet."""
    return Client(make_app(api.world.queue), api.keys["admin", None])


@pytest.mark.parametrize("payload", [{}, {"n": 1}, {"to": "https://10.0.0.1/"}])
def test_a_task_named_http_without_url_is_not_ours(api: Api, payload: dict[str, Any]) -> None:
    body = {"user_id": "acme-ann", "name": "http", "payload": payload}
    api.client().ok("POST", "/tasks", json=body)


def test_schedules_of_the_library_are_looked_at_too(
    queue: TaskQueue, names: dict[str, list[str]]
) -> None:
    scheduler = TaskScheduler(queue)
    good, bad = {"url": PUBLIC}, {"url": INSIDE}
    calls: list[Callable[[], object]] = [
        lambda: scheduler.add_schedule("@daily", "ann", name="http", payload=bad),
        lambda: scheduler.add_schedules(
            [{"cron_expr": "@daily", "user_id": "ann", "name": "http", "payload": bad}]
        ),
        lambda: scheduler.update_schedule("s", payload=bad),
        lambda: scheduler.trigger("s", payload=bad),
        lambda: scheduler.copy_schedule("s", payload=bad),
        lambda: scheduler.update_schedule("other", name="http"),
        lambda: Inspector(queue).tasks.push(user_id="ann", name="http", payload=bad),
    ]
    scheduler.add_schedule("@daily", "ann", name="http", payload=good, schedule_id="s")
    scheduler.add_schedule("@daily", "ann", name="x", payload=bad, schedule_id="other")
    for call in calls:
        with pytest.raises(InvalidPayload, match=r"payload\.url.*169\.254\.169\.254.*link-local"):
            call()
    result = scheduler.bulk("update", name="http", dry_run=False, payload=bad)
    assert (result.done, result.failed) == (0, 1)
    assert [each.payload for each in scheduler.list_schedules(name_prefix="http")] == [good]


def test_a_dry_run_refuses_an_import(queue: TaskQueue, names: dict[str, list[str]]) -> None:
    scheduler = TaskScheduler(queue)
    scheduler.add_schedule("@daily", "ann", name="http", payload={"url": PUBLIC}, schedule_id="s")
    for changed in ("s", "new"):
        documents = [
            {"schedule_id": each, "cron_expr": "@daily", "user_id": "ann", "name": "http"}
            | {"payload": {"url": INSIDE if each == changed else PUBLIC}}
            for each in ("s", "another", "new")
        ]
        for dry_run in (True, False):
            with pytest.raises(
                InvalidSchedule, match=rf"\('{changed}'\): payload\.url.*link-local"
            ):
                scheduler.import_schedules(documents, dry_run=dry_run)
    assert [each.schedule_id for each in scheduler.list_schedules()] == ["s"]


def test_an_import_reads_only_its_tasks(queue: TaskQueue, names: dict[str, list[str]]) -> None:
    scheduler = TaskScheduler(queue)
    names["moved.example"] = ["93.184.216.34"]
    payload = {"url": "https://moved.example/"}
    scheduler.add_schedule("@daily", "ann", name="http", payload=payload, schedule_id="s")
    names["moved.example"] = ["10.0.0.1"]
    again = TaskScheduler(queue)  # one that has looked nothing up
    document = again.export_schedules()[0] | {"title": "nightly"}
    assert again.import_schedules([document], dry_run=True).changed.keys() == {"s"}
    assert again.import_schedules([document], dry_run=False).changed.keys() == {"s"}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A name server that does not answer, until the test is over; which hosts were asked for."""
    done, asked = threading.Event(), list[str]()

    def look_up(host: str) -> list[str]:
        asked.append(host)
        done.wait(60)
        return ["127.0.0.1"]

    monkeypatch.setattr(network, "addresses_of", look_up)
    monkeypatch.setattr(outgoing, "HOST_S", 0.05)
    monkeypatch.setattr(outgoing, "HOSTS_S", 0.12)
    yield asked
    done.set()


def test_a_slow_name_server_holds_nobody_up(queue: TaskQueue, slow: list[str]) -> None:
    scheduler = TaskScheduler(queue)
    specs = [
        {"cron_expr": "@daily", "user_id": "ann", "name": "http", "payload": {"url": url}}
        for url in (f"https://host-{n}.example/" for n in range(50))
    ]
    assert len(scheduler.add_schedules(specs)) == 50
    assert 1 <= len(slow) <= 4  # then the time for lookups was used up
    assert len(scheduler.add_schedules(specs[:1])) == 1  # a host is not asked for again at once
    assert slow.count("host-0.example") == 1


def test_what_a_worker_says_of_its_http_tasks_is_not_listed(api: Api) -> None:
    announce(api.world.queue, allow_private=["10.1.0.0/16"])
    assert "10.1.0.0" not in api.client().send("GET", "/workers").text


def test_a_policy_that_somebody_has_planted_allows_nothing(api: Api) -> None:
    announce(api.world.queue)
    key = api.world.queue.keys["workers"]
    for worker, record in cast(dict[bytes, bytes], api.world.redis.hgetall(key)).items():
        planted = record.replace(b'"allow_private":[]', b'"allow_private":[{"a":1}]')
        api.world.redis.hset(key, worker, planted)
    body = {"user_id": "acme-ann", "name": "http", "payload": {"url": INSIDE}}
    api.client().refused(422, "POST", "/tasks", json=body)
