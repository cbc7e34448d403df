"""The options of a task that say where, how often and until when it may run."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from weakref import WeakSet

import pytest
from helpers.world import World

from fairqueue.clock import ManualClock
from fairqueue.errors import BrokenRecord, DuplicateTask, FairQueueError, InvalidTask
from fairqueue.models import Task

NAN, INF = float("nan"), float("inf")
IN_2100 = datetime(2100, 1, 1, tzinfo=UTC)
IN_2100_MS = 4_102_444_800_000
KEY = {"unique": "report:7"}

ALL: dict[str, Any] = {
    "pool": "gpu",
    "limit_keys": ["account:42", 'b"\\'],
    "unique": "report:7",
    "unique_for": 60,
    "debounce": 5,
    "max_wait": timedelta(minutes=1),
    "expires": 600.5,
    "cost": 3.5,
}
ALL_STORED = {
    "keys": ["account:42", 'b"\\'],
    "cost": 3.5,
    "expires": "+600500",
    "unique": "report:7",
    "on_duplicate": "replace",
    "unique_for": 60_000,
    "debounce": 5000,
    "max_wait": 60_000,
}


def create(**options: Any) -> Task:
    return Task.create(user_id="ann", task_id="t", **options)


def head_of(task: Task) -> dict[str, Any]:
    return dict(json.loads(task.status_head + "}"))


# --- bad input ------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"pool": ""}, "pool must be a string of 1 to 200 characters without control characters"),
    ({"pool": None}, "not None"),
    ({"pool": "a\0b"}, r"not 'a\x00b'"),
    ({"pool": "x" * 201}, "pool must be a string of 1 to 200"),
    ({"limit_keys": list("abcde")}, "limit_keys must have at most 4 keys, not 5: ['a', 'b'"),
    ({"limit_keys": [""]}, "a key of limit_keys must be a string of 1 to 200 characters"),
    ({"limit_keys": ["k" * 201]}, "a key of limit_keys must be a string of 1 to 200 characters"),
    ({"limit_keys": ["a\nb"]}, r"not 'a\nb'"),
    ({"limit_keys": [7]}, "not 7"),
    ({"limit_keys": ["account:*"]}, "must not contain '*', not 'account:*'"),
    ({"limit_keys": ["a*b"]}, "must not contain '*', not 'a*b'"),
    ({"limit_keys": ["a", "a"]}, "must have each key once, not 'a' 2 times"),
    ({"limit_keys": "account"}, "limit_keys must be a list of at most 4 strings, not 'account'"),
    ({"limit_keys": {"a"}}, "limit_keys must be a list of at most 4 strings, not {'a'}"),
    ({"unique": ""}, "unique must be a string of 1 to 200 characters"),
    ({"unique": "a\x05b"}, r"not 'a\x05b'"),
    ({"unique": 7}, "unique must be a string of 1 to 200 characters"),
    (KEY | {"on_duplicate": "skip"}, "must be one of ignore, replace, error, not 'skip'"),
    ({"on_duplicate": "replace"}, "on_duplicate needs unique"),
    ({"unique_for": 5}, "unique_for needs unique, the key of the task: unique_for=5"),
    (KEY | {"unique_for": "ever"}, "'unfinished', 'waiting' or a number of seconds, not 'ever'"),
    (KEY | {"unique_for": 0}, "unique_for must be 0.001 to 2592000 seconds, not 0"),
    (KEY | {"unique_for": -1}, "not -1"),
    (KEY | {"unique_for": NAN}, "not nan"),
    (KEY | {"unique_for": True}, "not True"),
    (KEY | {"unique_for": 2_592_001}, "not 2592001"),
    ({"debounce": 5}, "debounce needs unique, the key of the task: debounce=5"),
    (KEY | {"debounce": 0}, "debounce must be 0.001 to 2592000 seconds, not 0"),
    (KEY | {"debounce": -5}, "not -5"),
    (KEY | {"debounce": "5"}, "debounce must be a number of seconds or a timedelta, not '5'"),
    (KEY | {"debounce": 5, "on_duplicate": "ignore"}, "'replace' with debounce, not 'ignore'"),
    (KEY | {"debounce": 5, "on_duplicate": "error"}, "'replace' with debounce, not 'error'"),
    (KEY | {"debounce": 5, "delay": 1}, "pass debounce or delay, not both (debounce=5, delay=1)"),
    (KEY | {"debounce": 5, "at": IN_2100}, "pass debounce or at, not both"),
    (KEY | {"max_wait": 5}, "max_wait needs debounce: max_wait=5"),
    ({"max_wait": 5}, "max_wait needs unique"),
    (KEY | {"debounce": 5, "max_wait": 4}, "max_wait must be at least debounce, 5, not 4"),
    (KEY | {"debounce": 5, "max_wait": INF}, "not inf"),
    ({"expires": 0}, "expires must be 0.001 to 3155760000 seconds, not 0"),
    ({"expires": -1}, "not -1"),
    ({"expires": NAN}, "not nan"),
    ({"expires": True}, "not True"),
    ({"expires": "5"}, "a timedelta or a datetime with a time zone, not '5'"),
    ({"expires": datetime(2100, 1, 1)}, "a datetime with a time zone, such as datetime.now(UTC)"),
    ({"expires": datetime(2001, 2, 3, tzinfo=UTC)}, "not '2001-02-03T00:00:00+00:00', which is"),
    ({"expires": datetime(1901, 2, 3, tzinfo=UTC)}, "not '1901-02-03T00:00:00+00:00', which is"),
    ({"expires": 5, "delay": 5}, "expires must be longer than delay, or the task never starts"),
    (KEY | {"expires": 5, "debounce": 6}, "expires must be longer than debounce"),
    ({"expires": IN_2100, "at": IN_2100}, "expires must be later than at"),
    ({"cost": 0}, "cost must be a number greater than 0, from 1e-06 to 1000000, not 0"),
    ({"cost": -1}, "not -1"),
    ({"cost": NAN}, "not nan"),
    ({"cost": INF}, "not inf"),
    ({"cost": True}, "not True"),
    ({"cost": "3"}, "not '3'"),
    ({"cost": 1_000_000.1}, "not 1000000.1"),
    ({"cost": 10**400}, "cost must be a number greater than 0"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=[repr(case[0])[:60] for case in BAD])
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTask) as caught:
        create(**options)
    assert said in str(caught.value)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'limit_key'"):
        create(limit_key="a")


def test_an_expiry_is_compared_with_a_manual_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairqueue.clock._manual_clocks", WeakSet())  # others may be left
    clock = ManualClock()  # 2023
    task = create(expires=clock.now() + timedelta(seconds=5))
    assert task.expires == clock.now() + timedelta(seconds=5)
    with pytest.raises(InvalidTask, match="which is past"):
        create(expires=clock.now())


def test_a_duplicate_names_the_task_that_exists() -> None:
    error = DuplicateTask("task t has the key k", "t")
    assert isinstance(error, FairQueueError)
    assert (str(error), error.task_id) == ("task t has the key k", "t")


# --- what is stored -------------------------------------------------------------------------------


def test_a_plain_task_is_stored_as_ever() -> None:
    usual: dict[str, Any] = {
        "pool": "default",
        "limit_keys": [],
        "unique": None,
        "on_duplicate": "ignore",
    }
    usual |= {"unique_for": "unfinished", "expires": None, "cost": None}
    for task in (create(), create(**usual)):
        assert task.document == '{"user":"ann","name":"default","priority":3,"payload":{}}'
        assert task.status_head == '{"user":"ann","name":"default","level":3,"attempts":0'


def test_the_options_are_in_the_document_and_in_the_status() -> None:
    task = create(**ALL, tenant="acme")
    stored = json.loads(task.document)
    assert (stored["pool"], stored["flow"]) == ("gpu", ALL_STORED)
    assert "group" not in stored
    head = head_of(task)
    assert (head["pool"], head["flow"], head["group"]) == ("gpu", ALL_STORED, "acme")
    assert ',"flow":{' in task.status_head


@pytest.mark.parametrize(
    ("options", "flow"),
    [
        (KEY, {"unique": "report:7"}),
        (KEY | {"on_duplicate": "ignore", "unique_for": "unfinished"}, {"unique": "report:7"}),
        (KEY | {"on_duplicate": "error"}, {"unique": "report:7", "on_duplicate": "error"}),
        (KEY | {"unique_for": "waiting"}, {"unique": "report:7", "unique_for": "waiting"}),
        ({"expires": IN_2100}, {"expires": IN_2100_MS}),
        ({"cost": 1}, {"cost": 1.0}),
        ({"limit_keys": ("a", "b")}, {"keys": ["a", "b"]}),
    ],
    ids=repr,
)
def test_only_what_differs_from_the_default_is_stored(
    options: dict[str, Any], flow: dict[str, Any]
) -> None:
    task = create(**options)
    assert head_of(task)["flow"] == json.loads(task.document)["flow"] == flow


@pytest.mark.parametrize(
    "options", [{}, ALL, {"expires": IN_2100}, {"pool": "gpu"}, {"cost": 2}, KEY], ids=repr
)
def test_a_task_is_read_with_its_options(options: dict[str, Any]) -> None:
    task = create(**options)
    assert Task.from_document("t", task.document) == task


def test_a_task_shows_its_options() -> None:
    task = create(**ALL)
    assert (task.pool, task.limit_keys, task.cost) == ("gpu", ("account:42", 'b"\\'), 3.5)
    assert (task.unique, task.on_duplicate, task.unique_for) == ("report:7", "replace", 60.0)
    assert (task.debounce, task.max_wait, task.expires) == (5.0, 60.0, 600.5)
    plain = create()
    assert (plain.pool, plain.limit_keys, plain.unique, plain.cost) == ("default", (), None, None)
    assert (plain.on_duplicate, plain.unique_for, plain.expires) == ("ignore", "unfinished", None)


@pytest.mark.parametrize(
    "damaged",
    [
        {"pool": 7},
        {"flow": []},
        {"flow": {"keys": "a"}},
        {"flow": {"keys": [7]}},
        {"flow": {"cost": True}},
        {"flow": {"expires": "soon"}},
    ],
    ids=repr,
)
def test_damaged_options_make_a_document_unreadable(damaged: dict[str, Any]) -> None:
    document = json.dumps(json.loads(create().document) | damaged)
    with pytest.raises(BrokenRecord):
        Task.from_document("t", document)


# --- in a queue -----------------------------------------------------------------------------------


def test_get_shows_the_options(world: World) -> None:
    world.queue.push(create(pool="gpu", limit_keys=["a"], cost=2, tenant="acme"))
    world.queue.push(Task.create(user_id="ann", task_id="plain"))
    info, plain = world.queue.get("t"), world.queue.get("plain")
    assert info is not None
    assert plain is not None
    assert (info.pool, info.limit_keys, info.cost, info.tenant) == ("gpu", ("a",), 2.0, "acme")
    assert (plain.pool, plain.limit_keys, plain.cost) == ("default", (), None)
    assert (plain.tenant, plain.expires_at) == (None, None)


def test_the_retry_of_a_dead_letter_keeps_all_but_key_and_expiry(world: World) -> None:
    options = {
        "limit_keys": ["a"],
        "unique": "u",
        "unique_for": "waiting",
        "expires": 60,
        "cost": 2,
    }
    world.queue.push(create(**options, tenant="acme"))
    claim = world.queue.claim("w")[0]
    assert claim.task.unique == "u"
    world.queue.bury(claim, "broken")
    again = world.queue.get(world.history.retry("t"))
    assert again is not None
    assert again.task is not None
    assert (again.limit_keys, again.cost, again.tenant) == (("a",), 2.0, "acme")
    assert again.task.flow == create(limit_keys=["a"], cost=2).flow
    status = json.loads(world.redis.hget(world.keys["status"], again.task_id) or b"")
    assert (status["flow"], status["group"]) == ({"keys": ["a"], "cost": 2}, "acme")
