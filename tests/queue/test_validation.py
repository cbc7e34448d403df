"""Bad input is refused before anything is stored, by an error that names the value."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import redis
from helpers.state import dump
from helpers.tasks import claim_one, info_of, make_task, push

from fairqueue.alerts import Alerts, EmailRecipient, LogRecipient, WebhookRecipient
from fairqueue.clock import ManualClock
from fairqueue.errors import (
    ConfigurationError,
    EmbeddedServerError,
    FairQueueError,
    InvalidInput,
    InvalidPayload,
    InvalidSchedule,
    InvalidTask,
    kind_of,
)
from fairqueue.history.runs import History
from fairqueue.http_tasks.http import HttpTasks
from fairqueue.inspection import Inspector
from fairqueue.metrics.collectors import serve_metrics
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.retry_policy import check_policy
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.runtime.processes import ProcessGroup
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.isolation import check_isolated
from fairqueue.worker.worker import Worker

NAN, INF = float("nan"), float("inf")
NAIVE = datetime(2030, 1, 2, 3, 4, 5)
LONG = 10**400  # more than a float can hold


@pytest.fixture
def queue(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue, and nothing in Redis when the test is over."""
    with TaskQueue(redis_client, clock=ManualClock()) as queue:
        yield queue
    assert redis_client.dbsize() == 0


def refused(call: Callable[[], object], error: type[FairQueueError], *said: str) -> str:
    """The message with which a call is refused."""
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert type(caught.value) is error
    message = str(caught.value)
    for part in said:
        assert part in message, message
    return message


def named(value: object) -> str:
    """How an error names what cannot be a name: of what may hold anything, the type alone."""
    is_shown = value is None or isinstance(value, str | int)
    return repr(value)[:70] if is_shown else f"not {kind_of(value)}"


def nested(depth: int) -> Any:
    """A payload of so many levels."""
    value: Any = 1
    for _ in range(depth):
        value = {"d": value}
    return value


# --- tasks ----------------------------------------------------------------------------------------

BAD_NAMES = [
    "",
    "x" * 201,
    "a\0b",
    "a\nb",
    "\x1b[0m",
    "\x7f",
    "\x85",
    "\ud800",
    None,
    7,
    b"alice",
    True,
    ["a"],
    {"password": "hunter2"},
]


@pytest.mark.parametrize("value", BAD_NAMES, ids=repr)
@pytest.mark.parametrize("field", ["user_id", "task_id", "name"])
def test_bad_ids_and_names_are_refused(queue: TaskQueue, field: str, value: Any) -> None:
    if field == "task_id" and value is None:
        return  # means: make one
    fields = {"user_id": "alice", field: value}
    refused(lambda: queue.push(Task.create(**fields)), InvalidTask, field, named(value))


CALLS_WITH_NAMES: dict[str, Callable[[TaskQueue, Any], object]] = {
    "worker_id": lambda queue, value: queue.claim(value),
    "task_id of cancel": lambda queue, value: queue.cancel(value),
    "task_id of get": lambda queue, value: queue.get(value),
    "task_id of explain": lambda queue, value: queue.explain(value),
    "user_id of set_user": lambda queue, value: queue.set_user(value, weight=2),
    "user_id of get_user": lambda queue, value: queue.get_user(value),
    "user_id of size": lambda queue, value: queue.size(value),
}


@pytest.mark.parametrize("value", BAD_NAMES, ids=repr)
@pytest.mark.parametrize("call", CALLS_WITH_NAMES)
def test_bad_ids_are_refused_by_every_call(queue: TaskQueue, call: str, value: Any) -> None:
    if call == "user_id of size" and value is None:
        return  # means: all users
    what = call.split()[0]
    refused(lambda: CALLS_WITH_NAMES[call](queue, value), InvalidTask, what, named(value))


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "x" * 200,
        "é" * 200,
        "a b",
        "a:b",
        "{a}",
        "*",
        "s:1700",
        "日本",
        "\u2028",
        "'\"\\/",
        "%s",
    ],
)
def test_unusual_names_can_be_used(redis_client: redis.Redis, name: str) -> None:
    with TaskQueue(redis_client) as queue:
        queue.set_user(name, weight=2.0)
        queue.push(make_task(name, name, name=name, payload={name: name}))
        assert queue.size(name) == 1
        claim = claim_one(queue, worker=name)
        task = claim.task
        assert (task.task_id, task.user_id, task.name) == (name, name, name)
        assert task.payload == {name: name}
        queue.retry(claim, name)
        info = info_of(queue, name)
        assert (info.error, info.worker_id) == (name, name)
        assert queue.cancel(name)


@pytest.mark.parametrize(
    "task_id", ["s:1700000000000", "a:b:99999999999", ":17000000000", "x:" + "1" * 30]
)
def test_an_id_in_the_form_of_a_scheduled_fire_is_refused(queue: TaskQueue, task_id: str) -> None:
    refused(
        lambda: queue.push(make_task(task_id=task_id)), InvalidTask, repr(task_id), "scheduled fire"
    )


@pytest.mark.parametrize(
    "priority", [0, 7, -1, "HIGH", "3", True, False, 3.5, 3.0, None, NAN, [3], 10**30], ids=repr
)
def test_bad_priorities_are_refused(queue: TaskQueue, priority: Any) -> None:
    refused(
        lambda: queue.push(make_task(priority=priority)),
        InvalidTask,
        "priority",
        f"not {priority!r}",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"delay": -1},
        {"delay": -0.001},
        {"delay": NAN},
        {"delay": INF},
        {"delay": -INF},
        {"delay": "5"},
        {"delay": True},
        {"delay": 10**30},
        {"delay": LONG},
        {"delay": -LONG},
        {"delay": timedelta(seconds=-1)},
        {"delay": NAIVE},
        {"at": NAIVE},
        {"at": -1},
        {"at": NAN},
        {"at": INF},
        {"at": 1e18},
        {"at": LONG},
        {"at": "2030-01-02"},
        {"at": False},
        {"at": timedelta(seconds=1)},
        {"at": NAIVE.date()},
    ],
    ids=repr,
)
def test_bad_times_are_refused(queue: TaskQueue, fields: dict[str, Any]) -> None:
    ((field, value),) = fields.items()
    shown = repr(value.isoformat()) if value is NAIVE and field == "at" else repr(value)[:90]
    refused(lambda: queue.push(make_task(**fields)), InvalidTask, field, shown)


def test_two_times_at_once_are_refused(queue: TaskQueue) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    refused(
        lambda: queue.push(make_task(delay=5, at=at)), InvalidTask, "delay=5", "at=datetime", "both"
    )


@pytest.mark.parametrize("task", [None, {}, "t1", 7, {"user_id": "alice"}], ids=repr)
def test_what_is_no_task_is_refused(queue: TaskQueue, task: Any) -> None:
    refused(lambda: queue.push(task), InvalidTask, repr(task), "must be a Task")
    refused(lambda: queue.push_many([make_task(), task]), InvalidTask, repr(task), "must be a Task")


# --- payloads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        ([], "a list"),
        ([1], "a list"),
        ("text", "a str"),
        (7, "7"),
        (1.5, "1.5"),
        (True, "True"),
        (b"{}", "a bytes"),
        ({1, 2}, "a set"),
        (..., "an ellipsis"),
        ((("a", 1),), "a tuple"),
        (NAIVE, repr(NAIVE)),
    ],
    ids=repr,
)
def test_a_payload_that_is_no_object_is_refused(queue: TaskQueue, payload: Any, shown: str) -> None:
    message = refused(lambda: queue.push(make_task(payload=payload)), InvalidPayload)
    assert message == f"payload must be a dict (a JSON object), not {shown}"


BAD_VALUES: dict[str, tuple[Any, str, str]] = {
    "NaN": ({"a": {"b": [1, NAN]}}, "payload.a.b[1]", "nan"),
    "inf": ({"a": INF}, "payload.a", "inf"),
    "-inf": ({"a": [[-INF]]}, "payload.a[0][0]", "-inf"),
    "bytes": ({"items": [{"data": b"raw"}]}, "payload.items[0].data", "not a bytes"),
    "a set": ({"a": {1}}, "payload.a", "not a set"),
    "a datetime": ({"when": NAIVE}, "payload.when", f"not {NAIVE!r}, a datetime"),
    "a Decimal": ({"price": Decimal("1.5")}, "payload.price", "Decimal('1.5'), a Decimal"),
    "a secret number": ({"pin": [Decimal("1.5")]}, "payload.pin[0]", "not a Decimal"),
    "an object": ({"a": (object(),)}, "payload.a[0]", "not an object"),
    "a class": ({"a": int}, "payload.a", "not a type"),
    "an int key": ({"a": {1: 2}}, "payload.a", "strings as keys for JSON, not 1"),
    "a None key": ({"a": [{None: 2}]}, "payload.a[0]", "not None"),
    "a tuple key": ({("a", "b"): 2}, "payload", "not a tuple"),
    "a bytes key": ({b"a": 2}, "payload", "not a bytes"),
    "too deep": ({"x": nested(32)}, "payload.x.d.d", "32 levels"),
    "a lone surrogate": ({"a": [{"b": "x\ud800y"}]}, "payload.a[0].b", "a str, which"),
    "a lone surrogate in a list": ({"a": ["ok", "\udfff"]}, "payload.a[1]", "a lone surrogate"),
    "a lone surrogate as key": ({"a": {"\udc00": 1}}, "payload.a", "a dict with a key that is not"),
    "a long name": ({"x" * 1000: {1}}, "payload." + "x" * 192, ", not a set"),
    "a number of 5000 digits": ({"a": [0, 10**5000]}, "payload.a[1]", "digits"),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_what_json_cannot_hold_is_refused_with_its_path(queue: TaskQueue, kind: str) -> None:
    payload, path, value = BAD_VALUES[kind]
    message = refused(lambda: queue.push(make_task(payload=payload)), InvalidPayload, path, value)
    assert message.startswith(path), message


def test_a_payload_in_a_circle_is_refused(queue: TaskQueue) -> None:
    payload: dict[str, Any] = {"a": []}
    payload["a"].append(payload)
    refused(lambda: queue.push(make_task(payload=payload)), InvalidPayload, "payload.a[0].a[0]")


@pytest.mark.parametrize("text", ["x" * 262_144, "é" * 131_072, '"' * 131_072], ids=["a", "é", '"'])
def test_a_payload_that_is_too_large_is_refused(queue: TaskQueue, text: str) -> None:
    refused(
        lambda: queue.push(make_task(payload={"text": text})),
        InvalidPayload,
        "payload must be at most 262144 bytes",
    )


def test_the_largest_payloads_are_kept_exactly(redis_client: redis.Redis) -> None:
    largest = {"text": "x" * (262_144 - len('{"text":""}'))}
    deepest = nested(32)
    odd = {"": [None, True, -0.5, 1e300, 2**70, "\0\x7f\u2028😀"], "list": [[], {}], "é": ""}
    with TaskQueue(redis_client) as queue:
        for payload in (largest, deepest, odd):
            queue.push(make_task(payload=payload))
            claim = claim_one(queue)
            assert claim.task.payload == payload
            queue.finish(claim)


@pytest.mark.parametrize(
    "result", [NAN, {1, 2}, b"x", object(), "x" * 20_000, "\ud800", {(1, 2): 3}], ids=type
)
def test_a_bad_result_keeps_the_claim(redis_client: redis.Redis, result: Any) -> None:
    with TaskQueue(redis_client, clock=ManualClock()) as queue:
        push(queue, "t1")
        claim = claim_one(queue)
        before = dump(redis_client)
        refused(lambda: queue.finish(claim, result), InvalidPayload, "result")
        assert dump(redis_client) == before
        queue.finish(claim)


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, 1001, 1.0, "1", True, None, NAN], ids=repr)
def test_bad_limits_are_refused(queue: TaskQueue, limit: Any) -> None:
    refused(lambda: queue.claim("w", limit=limit), InvalidInput, "limit must be", f"not {limit!r}")


@pytest.mark.parametrize(
    "lease", [0, -1, 0.0001, 86_401, NAN, INF, LONG, "30", None, True], ids=repr
)
def test_bad_leases_are_refused(queue: TaskQueue, lease: Any) -> None:
    said = f"not {lease!r}"[:90]
    refused(lambda: queue.claim("w", lease=lease), InvalidInput, said)
    refused(lambda: queue.extend([], lease=lease), InvalidInput, said)


@pytest.mark.parametrize("wait", [-1, -0.1, NAN, INF, "5", None, True, NAIVE], ids=repr)
def test_bad_waits_are_refused(queue: TaskQueue, wait: Any) -> None:
    refused(lambda: queue.claim("w", wait=wait), InvalidInput, "wait must be", f"not {wait!r}")


@pytest.mark.parametrize("delay", [-1, NAN, INF, "5", None, True], ids=repr)
def test_bad_delays_of_a_retry_are_refused(redis_client: redis.Redis, delay: Any) -> None:
    with TaskQueue(redis_client, clock=ManualClock()) as queue:
        push(queue, "t1")
        claim = claim_one(queue)
        before = dump(redis_client)
        refused(lambda: queue.retry(claim, delay=delay), InvalidInput, f"not {delay!r}")
        assert dump(redis_client) == before


# --- settings -------------------------------------------------------------------------------------

BAD_SETTINGS: dict[str, list[Any]] = {
    "max_attempts": [0, -1, 1.5, "5", None, True, NAN, 10**12],
    "max_waiting": [-1, 1.5, "5", None, True],
    "keep_finished": [-1, 1.5, "5", None, False],
    "keep_dead": [-1, 1.5, "5", None],
    "keep_finished_for": [-1, NAN, INF, "5", None, True, timedelta(seconds=-1)],
    "keep_dead_for": [-1, NAN, INF, "5", None],
    "ageing": [-1, NAN, INF, LONG, "5", None, NAIVE],
    "cost": ["", "TIME", None, 1, "task"],
    "critical_share": [-0.1, 1.1, NAN, LONG, "0.5", None, True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, vs in BAD_SETTINGS.items() for v in vs], ids=repr
)
def test_bad_settings_are_refused(queue: TaskQueue, name: str, value: Any) -> None:
    fields: dict[str, Any] = {"max_attempts": 3, name: value}
    refused(lambda: queue.configure(**fields), ConfigurationError, name, repr(value)[:90])


BAD_USER_SETTINGS: dict[str, list[Any]] = {
    "weight": [0, -1, 0.009, 1001, NAN, INF, LONG, "2", None, True],
    "max_running": [0, -1, 1.5, "", "3", [], {}, True, False, NAN, 0.0],
    "max_waiting": [0, -1, 1.5, "", "3", [], True, False],
    "rate": [0, -1, 1e7, NAN, INF, "", "1", True],
    "paused": [0, 1, "yes", None, ""],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, vs in BAD_USER_SETTINGS.items() for v in vs], ids=repr
)
def test_bad_settings_of_a_user_are_refused(queue: TaskQueue, name: str, value: Any) -> None:
    fields: dict[str, Any] = {name: value}
    said = repr(value)[:90]
    refused(lambda: queue.set_user("alice", **fields), ConfigurationError, name, said)


@pytest.mark.parametrize(
    "name", ["", "a b", "{a}", "a}", "{", "x" * 65, "a:b", "é", "a\n", None, 7, b"a"], ids=repr
)
def test_bad_queue_names_are_refused(redis_client: redis.Redis, name: Any) -> None:
    said = f"not {name!r}"
    refused(lambda: TaskQueue(redis_client, name), ConfigurationError, "queue name", said)
    refused(lambda: TaskQueue.from_url("redis://localhost", name), ConfigurationError, repr(name))


@pytest.mark.parametrize("timeout", [0, 0.05, -1, 31, NAN, INF, "5", None, True], ids=repr)
def test_bad_time_outs_are_refused(redis_client: redis.Redis, timeout: Any) -> None:
    refused(
        lambda: TaskQueue(redis_client, timeout=timeout), ConfigurationError, f"not {timeout!r}"
    )


@pytest.mark.parametrize("client", [None, "redis://localhost", 7, ...], ids=repr)
def test_what_is_no_client_is_refused(client: Any) -> None:
    said = f"client must be a redis.Redis or a redis.RedisCluster, not {kind_of(client)}"
    refused(lambda: TaskQueue(client), ConfigurationError, said)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", "''"),
        ("localhost", "'***'"),
        ("http://localhost", "'http://localhost'"),
        ("redis//x", "'***'"),
        (None, "None"),
        (7, "7"),
        (b"redis://:hunter2@h", "a bytes"),
        ("redis://h:port", "'redis://***'"),
    ],
)
def test_bad_urls_are_refused(url: Any, shown: str) -> None:
    message = refused(lambda: TaskQueue.from_url(url), ConfigurationError, "redis://")
    assert message.startswith(f"{shown} is not a Redis URL")


@pytest.mark.parametrize("start", [NAIVE, "now", None, NAN, -1, LONG], ids=repr)
def test_a_clock_needs_a_moment(start: Any) -> None:
    refused(lambda: ManualClock(start), InvalidInput, "start")


def test_an_error_does_not_show_the_password_of_a_url() -> None:
    with pytest.raises(ConfigurationError) as error:
        TaskQueue.from_url("redis://alice:hunter2@localhost:no-port/0")

    assert "hunter2" not in str(error.value)
    assert "redis://***@***" in str(error.value)


# --- what is no list, and what is no claim --------------------------------------------------------

NO_LISTS = [5, None, "mail", b"mail", Task.create(user_id="alice")]


@pytest.mark.parametrize("value", NO_LISTS)
def test_what_is_no_list_of_tasks_is_refused(queue: TaskQueue, value: Any) -> None:
    refused(lambda: queue.push_many(value), InvalidTask, "tasks must be a list of tasks, not ")


@pytest.mark.parametrize("value", [each for each in NO_LISTS if each is not None])
def test_what_is_no_list_of_names_is_refused(queue: TaskQueue, value: Any) -> None:
    refused(
        lambda: queue.claim("w", names=value),
        InvalidTask,
        "names must be a list of task names, or None for all, not a",
    )


@pytest.mark.parametrize("value", NO_LISTS)
def test_what_is_no_list_of_names_to_avoid_is_refused(queue: TaskQueue, value: Any) -> None:
    said = "avoid must be a list of task names"
    refused(lambda: queue.claim("w", avoid=value), InvalidTask, said)
    refused(lambda: queue.claim("w", names=["a"], avoid=value), InvalidTask, said)


@pytest.mark.parametrize("value", [[], ["claim"], None, "t", 5, Task.create(user_id="alice")])
@pytest.mark.parametrize("end", ["finish", "retry", "release", "bury"])
def test_what_is_no_claim_cannot_be_ended(queue: TaskQueue, end: str, value: Any) -> None:
    refused(
        lambda: getattr(queue, end)(value),
        InvalidInput,
        "claim must be a Claim, not ",
        "claim() returned",
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "claims must be a list of claims, not an int"),
        (None, "claims must be a list of claims, not None"),
        ("abc", "claims must be a list of claims, not a str"),
        ([5], "claim must be a Claim, not an int"),
        ([[]], "claim must be a Claim, not a list"),
    ],
)
def test_only_a_list_of_claims_can_be_extended(queue: TaskQueue, value: Any, said: str) -> None:
    refused(lambda: queue.extend(value), InvalidInput, said)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "results must be a list of (claim, result), not an int"),
        ("ab", "results must be a list of (claim, result), not a str"),
        ([5], "results must be pairs of a claim and its result, not an int"),
        (["ab"], "results must be pairs of a claim and its result, not a str"),
        ([(1,)], "results must be pairs of a claim and its result, not a tuple"),
        ([(1, 2, 3, 4)], "results must be pairs of a claim and its result, not a tuple"),
        ([(5, None)], "claim must be a Claim, not an int"),
    ],
)
def test_only_a_list_of_results_can_be_finished(queue: TaskQueue, value: Any, said: str) -> None:
    refused(lambda: queue.finish_many(value), InvalidInput, said)
    refused(lambda: queue.finish_and_claim(value, "w", 1), InvalidInput, said)


def test_a_single_claim_is_no_list_of_them(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client, clock=ManualClock()) as queue:
        push(queue, "t")
        claim: Any = claim_one(queue)
        with pytest.raises(InvalidInput, match="claims must be a list of claims, not a Claim"):
            queue.extend(claim)
        with pytest.raises(InvalidInput, match=r"results must be a list of .*, not a Claim"):
            queue.finish_many(claim)
        assert queue.extend((claim,)) == ["extended"]
        assert queue.finish_many([(claim, None)]) == ["finished"]


@pytest.mark.parametrize("value", [5, "x", "ops@example.org", None])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda queue, value: Alerts(value), "recipients"),
        (lambda queue, value: HttpTasks(allow_private=value), "allow_private"),
        (lambda queue, value: EmailRecipient(host="h", sender="a@example.org", to=value), "to"),
        (lambda queue, value: Worker(queue, modules=value), "modules"),
    ],
)
def test_what_is_no_list_is_refused_by_name(
    queue: TaskQueue, make: Callable[[TaskQueue, Any], object], name: str, value: Any
) -> None:
    refused(lambda: make(queue, value), ConfigurationError, f"{name} must be a list of")


def test_a_recipient_that_is_not_in_a_list_is_refused() -> None:
    alone: Any = LogRecipient()
    refused(lambda: Alerts(alone), ConfigurationError, "not a LogRecipient")


@pytest.mark.parametrize("value", [None, "default", 5])
def test_metrics_of_what_is_no_queue_are_not_served(value: Any) -> None:
    refused(lambda: serve_metrics(value, port=0), ConfigurationError, "queue must be a TaskQueue")


def test_metrics_of_what_is_no_registry_are_not_served(queue: TaskQueue) -> None:
    bad: Any = "x"
    refused(
        lambda: serve_metrics(queue, 0, registry=bad),
        ConfigurationError,
        "registry must be a CollectorRegistry, not a str",
    )


@pytest.mark.parametrize("host", [None, 5, [], ["x"], b"127.0.0.1"])
def test_metrics_are_not_served_at_what_is_no_host(queue: TaskQueue, host: Any) -> None:
    said = f"host must be a string, not {kind_of(host)}"
    refused(lambda: serve_metrics(queue, 0, host), ConfigurationError, said)


@pytest.mark.parametrize("host", ["a\0b", "\ud800", "ü" * 300, "300.1.1.1"])
def test_metrics_are_not_served_at_a_host_that_cannot_be(queue: TaskQueue, host: str) -> None:
    message = refused(
        lambda: serve_metrics(queue, 0, host), ConfigurationError, "cannot serve metrics on "
    )
    assert message.isprintable()


# --- values that are long -------------------------------------------------------------------------


def any_(value: Any) -> Any:
    """A value that the types do not allow."""
    return value


BIG = "x" * 100_000
TOO_LONG: dict[str, Callable[[TaskQueue], object]] = {
    "queue of a worker": lambda queue: Worker(any_(BIG)),
    "queue of a scheduler": lambda queue: TaskScheduler(any_(BIG)),
    "client": lambda queue: TaskQueue(any_(BIG)),
    "handler": lambda queue: Worker(queue, handler=any_(BIG)),
    "alerts": lambda queue: Worker(queue, alerts=any_(BIG)),
    "alerts of a scheduler": lambda queue: TaskScheduler(queue, alerts=any_(BIG)),
    "capture_logs": lambda queue: Worker(queue, capture_logs=any_(BIG)),
    "registry": lambda queue: Worker(queue, registry=any_(BIG)),
    "max_tasks": lambda queue: Worker(queue, max_tasks=any_(BIG)),
    "isolation": lambda queue: Worker(queue).task("t", isolation=BIG),
    "option": lambda queue: Worker(queue).task("t", **any_({BIG: 1})),
    "target": lambda queue: Worker(queue).register("t", any_(BIG)),
    "target of a process": lambda queue: check_isolated(BIG),
    "hook": lambda queue: Worker(queue).task("t", before=any_([BIG])),
    "policy": lambda queue: check_policy({BIG: 1, any_(5): 2}),
    "processes": lambda queue: ProcessGroup(any_(BIG), 1),
    "allow_private": lambda queue: HttpTasks(allow_private=[BIG]),
    "network of allow_private": lambda queue: HttpTasks(allow_private=[f"/{BIG}"]),
    "part of allow_private": lambda queue: HttpTasks(allow_private=[f"{BIG}@"]),
    "field of a schedule": lambda queue: TaskScheduler(queue).add_schedules([{BIG: 1}]),
    "mixed fields": lambda queue: TaskScheduler(queue).add_schedules([any_({BIG: 1, 5: 2})]),
    "changes": lambda queue: TaskScheduler(queue).bulk("pause", **any_({BIG: 1})),
    "host": lambda queue: serve_metrics(queue, 0, BIG),
    "header": lambda queue: WebhookRecipient("https://h/", headers={BIG: "\n"}),
    "headers": lambda queue: WebhookRecipient("https://h/", headers=any_(BIG)),
    "tls": lambda queue: EmailRecipient(
        host="h", sender="a@b.org", to=["b@b.org"], tls=any_([BIG])
    ),
}


@pytest.mark.parametrize("place", TOO_LONG)
def test_no_error_repeats_a_long_value(queue: TaskQueue, place: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        TOO_LONG[place](queue)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("path", [BIG, f"/dev/null/{BIG}", f"/tmp/{BIG}\0", any_(5), any_(b"x")])
def test_a_folder_that_cannot_be_is_named_and_not_repeated(path: Any) -> None:
    with pytest.raises(EmbeddedServerError, match=r"the folder '|path must be .*, not a") as caught:
        TaskQueue.embedded(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["x", 5, datetime.now, object()])
def test_what_tells_no_time_is_no_clock(redis_client: redis.Redis, value: Any) -> None:
    said = "clock must be None or have a method now_ms"
    refused(lambda: TaskQueue(redis_client, clock=value), ConfigurationError, said)
    refused(lambda: TaskQueue.from_url("redis://h", clock=value), ConfigurationError, said)


def test_a_server_started_for_a_bad_queue_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[EmbeddedServer] = []
    stop = EmbeddedServer.stop

    def note(self: EmbeddedServer, *args: Any) -> None:
        stopped.append(self)
        stop(self, *args)

    monkeypatch.setattr(EmbeddedServer, "stop", note)
    bad: Any = "x"
    refused(lambda: TaskQueue.embedded(clock=bad), ConfigurationError, "clock")
    assert len(stopped) == 1


@pytest.mark.parametrize(
    ("value", "kind"), [("abc", "a str"), (5, "an int"), (make_task("ann"), "a Task")]
)
def test_what_is_no_list_of_ids_is_refused(queue: TaskQueue, value: Any, kind: str) -> None:
    said = f"task_ids must be a list of task ids, not {kind}"
    refused(lambda: History(queue).find(value), InvalidInput, said)
    refused(lambda: Inspector(queue).runs.find(value), InvalidInput, said)
    scheduler = TaskScheduler(queue)
    said = f"ids must be a list of ids of schedules, not {kind}"
    refused(lambda: scheduler.bulk("pause", ids=value), InvalidSchedule, said)


@pytest.mark.parametrize("timeout", ["1", 0, -1, True, [], float("nan")])
@pytest.mark.parametrize("call", [TaskQueue.check, TaskQueue.inspect])
def test_a_time_out_of_a_call_is_checked(queue: TaskQueue, call: Any, timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout"):
        call(queue, timeout=timeout)
