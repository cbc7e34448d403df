"""Whatever is passed in, sent or planted: no crash, no hang, no half write, and others go on.

FAIRQUEUE_FUZZ_EXAMPLES says how many examples each test takes, for long runs; they are the same
ones each time. That nothing hangs is what the time-out of each test says.
"""

import asyncio
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any, TypeVar, cast

import click
import pytest
import redis
from helpers.commands import Cli, all_commands
from helpers.rest import PROBLEM, Api
from helpers.state import State, changes
from helpers.tasks import Unshowable, claim_one, make_task
from helpers.world import World
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from fairqueue import FairQueueError, History, Task, TaskQueue, TaskScheduler, Worker
from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.access.idempotency import ReplyStore
from fairqueue.clock import ManualClock
from fairqueue.doctor import Doctor
from fairqueue.errors import BrokenRecord, RedisRefused
from fairqueue.inspection import Inspector
from fairqueue.link.keys import BARRIER, KEY_TYPES
from fairqueue.queue.workers import WorkerStore
from fairqueue.schedules.import_export import load_schedules
from fairqueue.stats.samples import SampleStore
from fairqueue.stats.users import UserStats
from fairqueue.web import create_app
from fairqueue.web.api.endpoint import PREFIX
from fairqueue.web.api.endpoints import ENDPOINTS

EXAMPLES = int(os.environ.get("FAIRQUEUE_FUZZ_EXAMPLES", "0"))  # 0: as each test says
# What is written down about requests: no part of what they ask for.
ABOUT_REQUESTS = ("audit", "api_pace", "replies", "replies_before", "samples")

Test = TypeVar("Test", bound=Callable[..., Any])


def fuzz(examples: int) -> Callable[[Test], Test]:
    """So many examples, unless the environment says how many."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


# --- hostile values -------------------------------------------------------------------------------


def nested(depth: int, *, width: int = 1) -> Any:
    """A list in a list, and so on; with a width, it is the same one each time."""
    value: Any = []
    for _ in range(depth):
        value = [value] * width
    return value


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

TEXTS = [
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\x01",
        "\n",
        "a\r\nb",
        "\x1b[2J\x1b]0;x\x07",
        "\x7f",
        "\x85",
        "\u2028",
    ),
    *("\ud800", "a\udfffb", "\u202etxt", "\ufeff", "é" * 200, "𝕏" * 200, "x" * 201, "x" * 70_000),
    *("-", "--", "-1", "-o", "--help", "--url=x", "@/etc/passwd", "@-", "../../etc/passwd", "~"),
    *("%s%n%d", "%1$s", "{}", "{0.__class__}", "[", "]]>", "[a-z]*", "^(a+)+$", "%a+%", "'\"`;--"),
    *("nan", "inf", "-inf", "1e999", "0x10", "007", "1_000", "٣", "9" * 400, "null", "true", "\\0"),
    *("s:1700000000000", ":1", "a:b", "*", "* * * * *", "0 9 * * *", "H H * * *", "@reboot"),
    *("UTC", "Europe/Berlin", "../UTC", "/etc/localtime", "Europe\0/Berlin", "2026-01-01"),
    *("9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+23:59", "1h", "secret:X", "***", "alice"),
]
NUMBERS: list[Any] = [
    *(0, -1, 1, 7, 2**31, 2**53 + 1, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e300, math.nan),
    *(math.inf, -math.inf, True, False),
]
# By name, because not all of them can be shown.
STRANGE: dict[str, Any] = {
    "400 digits": 10**400,
    "5000 digits": 10**5000,
    "less than zero by 5000 digits": -(10**5000),
    "unspeakable": Unshowable(),
    "a circle": CIRCLE,
    "deep": nested(40),
    "deeper than calls can go": nested(5000),
    "few objects, many paths": nested(31, width=2),
    "few objects, paths without end": nested(60, width=2),
    "none": None,
    "bytes": b"\xff",
    "a set": {1, 2},
    "a tuple": (1, (2,)),
    "complex": 1j,
    "Decimal NaN": Decimal("NaN"),
    "Decimal": Decimal("1e999"),
    "dots": ...,
    "an object": object(),
    "a class": int,
    "a function": len,
    "a range": range(3),
    "naive": datetime(2026, 1, 1),
    "aware": datetime(2026, 1, 1, tzinfo=UTC),
    "the last moment": datetime.max.replace(tzinfo=UTC),
    "the first moment": datetime.min.replace(tzinfo=UTC),
    "a date": date(2026, 1, 1),
    "longest": timedelta.max,
    "negative": timedelta(-1),
    "a zone": UTC,
}


@dataclass(frozen=True)
class Named:
    """Stands for one of STRANGE."""

    name: str


def build(value: Any) -> Any:
    """A value with the strange ones in it."""
    if isinstance(value, Named):
        return STRANGE[value.name]
    if isinstance(value, list):
        return [build(each) for each in value]
    if isinstance(value, dict):
        return {name: build(each) for name, each in value.items()}
    return value


texts = st.one_of(
    st.sampled_from(TEXTS),
    st.text(max_size=40),
    st.text("\0\x01 -%{}[]()\"'\\:;,.*?/@é\ud800\u2028", max_size=20),
)
scalars = st.one_of(texts, st.sampled_from(NUMBERS), st.integers(), st.floats())
strange = st.sampled_from([Named(name) for name in STRANGE])
values = st.recursive(
    st.one_of(scalars, strange),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(st.sampled_from([1, None, b"a", (1,), "a"]), inner, max_size=2),
    ),
    max_leaves=8,
)
# What JSON can hold, to see that it comes back as it was.
plain = st.dictionaries(
    st.text(max_size=10),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=20))
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    ),
    max_size=4,
).filter(lambda value: not re.search("[\ud800-\udfff]", repr(value)) and "\\ud" not in repr(value))


def fields(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Hostile values for some of these fields."""
    return st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3)


# --- the Python API -------------------------------------------------------------------------------

SCHEDULE_FIELDS = (
    *("cron_expr", "user_id", "priority", "payload", "timezone", "name", "metadata", "every"),
    *("anchor", "at", "start", "end", "windows", "exclude", "max_runs", "misfire", "catch_up"),
    *("max_catch_up", "jitter", "overlap", "retries", "backoff", "timeout", "max_failures"),
    *("backoff_cap", "backoff_multiplier", "backoff_jitter", "tenant", "schedule_id"),
    *("pool", "limit_keys", "unique", "on_duplicate", "unique_for", "expires", "cost"),
)


class FuzzedWorld(World):
    """A queue with a task and a schedule."""

    def state(self, **options: Any) -> State:
        """All that is stored, without the records of requests."""
        state = super().state(**options)
        return {name: value for name, value in state.items() if name not in ABOUT_REQUESTS}


def task_fields(**given: Any) -> dict[str, Any]:
    return {"user_id": "alice", **given}


def schedule_fields(**given: Any) -> dict[str, Any]:
    rule = {} if {"every", "at", "cron_expr"} & given.keys() else {"cron_expr": "0 9 * * *"}
    return {"user_id": "alice", **rule, **given}


Call = Callable[[FuzzedWorld, dict[str, Any]], object]

WRITES: dict[str, tuple[st.SearchStrategy[dict[str, Any]], Call]] = {
    "push": (
        fields(
            *("user_id", "payload", "priority", "name", "task_id", "delay", "at", "triggered_by"),
            *("tenant", "pool", "limit_keys", "unique", "on_duplicate", "unique_for", "debounce"),
            *("max_wait", "expires", "cost"),
        ),
        lambda w, given: w.queue.push(Task.create(**task_fields(**given))),
    ),
    "push_many": (
        st.fixed_dictionaries({"tasks": st.lists(values, min_size=1, max_size=3)}),
        lambda w, given: w.queue.push_many([make_task("bob"), *given["tasks"]]),
    ),
    "reschedule": (fields("delay", "at"), lambda w, given: w.queue.reschedule("waiting", **given)),
    "set_user": (
        fields("weight", "max_running", "max_waiting", "rate", "paused", "tenant"),
        lambda w, given: w.queue.set_user("alice", **given),
    ),
    "set_tenant": (
        fields("weight", "max_running", "max_waiting", "rate", "paused", "note", "by", "until"),
        lambda w, given: w.queue.set_tenant("acme", **given),
    ),
    "move_user": (
        fields("user_id", "to", "tenant"),
        lambda w, given: w.queue.move_user(**{"user_id": "alice", "to": None, **given}),
    ),
    "set_limit": (
        fields("key", "slots", "rate", "ordered", "through_retries", "scope"),
        lambda w, given: w.queue.set_limit(**{"key": "account:1", **given}),
    ),
    "set_limits": (
        fields("slots", "rate", "timeout"),
        lambda w, given: w.queue.set_limits("mail", **given),
    ),
    "configure": (
        fields(
            *("max_attempts", "max_waiting", "keep_finished", "keep_finished_for", "keep_dead"),
            *("keep_dead_for", "cost", "critical_share", "ageing", "max_schedules", "min_interval"),
        ),
        lambda w, given: w.queue.configure(**given),
    ),
    "add_schedule": (
        fields(*SCHEDULE_FIELDS),
        lambda w, given: w.scheduler.add_schedule(**schedule_fields(**given)),
    ),
    "add_schedules": (
        fields(*SCHEDULE_FIELDS),
        lambda w, given: w.scheduler.add_schedules(
            [schedule_fields(), schedule_fields(**given), cast(Any, given)]
        ),
    ),
    "update_schedule": (
        fields(*SCHEDULE_FIELDS, "is_active", "next_run"),
        lambda w, given: w.scheduler.update_schedule("nine", **named(given)),
    ),
    "import_schedules": (
        fields(*SCHEDULE_FIELDS, "is_active", "unknown"),
        lambda w, given: w.scheduler.import_schedules(
            [{"schedule_id": "new", **schedule_fields(**given)}, cast(Any, given)]
        ),
    ),
    "trigger": (
        fields("payload", "triggered_by"),
        lambda w, given: w.scheduler.trigger("nine", **given),
    ),
    "pause": (
        fields("by", "note", "until"),
        lambda w, given: w.scheduler.pause_schedule("nine", **given),
    ),
    "backfill": (
        fields("start", "end", "limit", "priority"),
        lambda w, given: w.scheduler.backfill(
            "nine", **{"start": 1.7e9, "end": 1.7e9 + 60, **given}
        ),
    ),
    "bulk": (
        fields("ids", "changes", "note", "user_id", "name_prefix", "contains", "is_active"),
        lambda w, given: w.scheduler.bulk("update", **{"changes": {"jitter": 1}, **given}),
    ),
    "copy": (
        fields(*SCHEDULE_FIELDS),
        lambda w, given: w.scheduler.copy_schedule("nine", None, **named(given)),
    ),
    "users.set": (
        fields("weight", "max_running", "rate", "tenant"),
        lambda w, given: w.inspector.users.set("alice", **given),
    ),
    "keys.create": (
        fields("name", "role", "tenant", "expires_in"),
        lambda w, given: w.inspector.keys.create(**{"name": "ann", "role": "viewer", **given}),
    ),
}


def named(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without an id: it is the first argument already."""
    return {name: value for name, value in given.items() if name != "schedule_id"}


@pytest.fixture
def fuzzed(world: World) -> FuzzedWorld:
    world.push("waiting")
    world.add("nine")
    given = (world.redis, world.clock, world.queue, world.registry, world.monkeypatch)
    return FuzzedWorld(*given)


def refused(fuzzed: FuzzedWorld, call: Callable[[], object]) -> bool:
    """Make a call: it succeeds, or raises an error of ours that changed nothing."""
    before = fuzzed.state()
    try:
        call()
    except FairQueueError as error:
        text = str(error)
        assert text
        assert len(text) < 20_000
        assert changes(before, fuzzed.state()) == {}
        return True
    return False


@pytest.mark.untidy
@pytest.mark.parametrize("name", WRITES)
def test_what_is_refused_changes_nothing(fuzzed: FuzzedWorld, name: str) -> None:
    given_fields, call = WRITES[name]
    count = [0, 0]

    @fuzz(25)
    @given(given_fields)
    def run(given: dict[str, Any]) -> None:
        count[refused(fuzzed, lambda: call(fuzzed, build(given)))] += 1

    run()
    assert count[True]


@pytest.mark.parametrize("revision", ["", " ", "\0", "\ud800", "x" * 1000])
def test_an_unknown_revision_is_not_ignored(fuzzed: FuzzedWorld, revision: str) -> None:
    assert refused(fuzzed, lambda: fuzzed.scheduler.remove_schedule("nine", if_revision=revision))
    assert refused(
        fuzzed, lambda: fuzzed.scheduler.update_schedule("nine", if_revision=revision, jitter=1)
    )


LOOK_UPS: dict[str, Callable[[FuzzedWorld, Any], object]] = {
    "get": lambda w, value: w.queue.get(value),
    "explain": lambda w, value: w.queue.explain(value),
    "size": lambda w, value: w.queue.size(value),
    "get_user": lambda w, value: w.queue.get_user(value),
    "get_user of": lambda w, value: w.queue.get_user("alice", tenant=value),
    "get_tenant": lambda w, value: w.queue.get_tenant(value),
    "tenants_of": lambda w, value: w.queue.tenants_of(value),
    "quote": lambda w, value: w.queue.quote(value),
    "quote of": lambda w, value: w.queue.quote("alice", tenant=value, name=value, pool=value),
    "claim pools": lambda w, value: w.queue.claim("w", names=["nothing"], pools=[value]),
    "cancel": lambda w, value: w.queue.cancel(value),
    "claim": lambda w, value: w.queue.claim(value, names=["nothing"]),
    "claim names": lambda w, value: w.queue.claim("w", names=[value, "nothing"]),
    "get_schedule": lambda w, value: w.scheduler.get_schedule(value),
    "remove_schedule": lambda w, value: value == "nine" or w.scheduler.remove_schedule(value),
    "remove if": lambda w, value: (
        value is not None and w.scheduler.remove_schedule("nine", if_revision=value)
    ),
    "list user": lambda w, value: w.scheduler.list_schedules(value),
    "list cursor": lambda w, value: w.scheduler.list_schedules(cursor=value),
    "list limit": lambda w, value: w.scheduler.list_schedules(limit=value),
    "list prefix": lambda w, value: w.scheduler.list_schedules(name_prefix=value),
    "list part": lambda w, value: w.scheduler.list_schedules(contains=value),
    "list tenant": lambda w, value: w.scheduler.list_schedules(tenant=value),
    "list active": lambda w, value: w.scheduler.list_schedules(is_active=value),
    "moments": lambda w, value: w.scheduler.moments("nine", value, value),
    "changes": lambda w, value: w.scheduler.changes("nine", cursor=value),
    "run": lambda w, value: History(w.queue).get(value),
    "runs of": lambda w, value: History(w.queue).runs(user_id=value),
    "runs status": lambda w, value: History(w.queue).runs(status=value),
    "runs since": lambda w, value: History(w.queue).runs(since=value),
    "runs cursor": lambda w, value: History(w.queue).runs(cursor=value),
    "groups": lambda w, value: History(w.queue).failure_groups(cursor=value),
    "retry": lambda w, value: History(w.queue).retry(value),
    "discard": lambda w, value: History(w.queue).discard(value),
    "prune": lambda w, value: History(w.queue).prune(value),
    "user names": lambda w, value: UserStats(w.queue.link).names(cursor=value),
    "users": lambda w, value: w.inspector.users.get(value),
    "drain": lambda w, value: w.inspector.workers.drain(value),
    "audit": lambda w, value: w.inspector.audit.list(cursor=value),
    "revoke": lambda w, value: w.inspector.keys.revoke(value),
    "preview": lambda w, value: w.inspector.schedules.preview(value),
    "preview zone": lambda w, value: w.inspector.schedules.preview("0 9 * * *", timezone=value),
    "admit": lambda w, value: AccessStore(w.queue.link).admit(str_of(value), rate=1, burst=1),
    "redeem": lambda w, value: AccessStore(w.queue.link).redeem(str_of(value)),
    "reply": lambda w, value: ReplyStore(w.queue.link).begin(value, "digest"),
}


def str_of(value: Any) -> str:
    return value if isinstance(value, str) else "no text"


@pytest.mark.untidy
@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_look_up_with_anything_finds_nothing_or_says_why(fuzzed: FuzzedWorld, name: str) -> None:
    call = LOOK_UPS[name]

    @fuzz(12)
    @given(values)
    def run(value: Any) -> None:
        before = fuzzed.state()
        refused(fuzzed, lambda: call(fuzzed, build(value)))
        if name != "cancel" or value != "waiting":
            assert changes(before, fuzzed.state()) == {}

    run()


@fuzz(30)
@given(payload=plain, text=st.text(min_size=1, max_size=200))
def check_round_trip(fuzzed: FuzzedWorld, payload: dict[str, Any], text: str) -> None:
    """What is taken comes back the same: by get, claim, history, schedule, export and import."""
    try:
        task = Task.create(user_id=text, name=text, payload=payload)
    except FairQueueError:
        return  # the text has a control character, or the number is too long
    fuzzed.queue.push(task)
    info = fuzzed.queue.get(task.task_id)
    assert info is not None
    assert info.task is not None
    assert (info.user_id, info.name, info.task.payload) == (text, text, payload)
    details = History(fuzzed.queue).get(task.task_id)
    assert details is not None
    assert details.task == info.task
    rule: dict[str, Any] = {"every": 60, "user_id": text, "name": text, "payload": payload}
    schedule_id = fuzzed.scheduler.add_schedule(metadata=payload, **rule)
    (document,) = (
        each
        for each in fuzzed.scheduler.export_schedules(user_id=text)
        if each["schedule_id"] == schedule_id
    )
    assert fuzzed.scheduler.import_schedules([document], dry_run=True).is_empty
    assert fuzzed.scheduler.import_schedules(
        load_schedules(json.dumps([document])), dry_run=True
    ).is_empty
    stored = fuzzed.scheduler.get_schedule(schedule_id)
    assert stored is not None
    assert (stored.user_id, stored.payload, stored.metadata) == (text, payload, payload)
    fuzzed.scheduler.remove_schedule(schedule_id)
    claim = claim_one(fuzzed.queue)
    assert (claim.task.task_id, claim.task.payload) == (task.task_id, payload)
    fuzzed.queue.finish(claim, payload)
    done = fuzzed.queue.get(task.task_id)
    assert done is not None
    assert done.result == payload


@pytest.mark.untidy
def test_what_is_accepted_comes_back_the_same(fuzzed: FuzzedWorld) -> None:
    fuzzed.queue.cancel("waiting")
    check_round_trip(fuzzed)


DOCUMENTS = [
    *("", "[", "{", "null", "7", '"x"', "[[]]", "[null]", "[7]", "[{}]", '[{"schedule_id":7}]'),
    *(
        "[" * 100_000,
        "[" * 900 + "]" * 900,
        '{"a":' * 10_000,
        '[{"schedule_id":"a"},{"schedule_id"',
    ),
    '[{"schedule_id":"a","schedule_id":"b","user_id":"u","every":60}]',
    '[{"schedule_id":"a","user_id":"u","every":1e999}]',
    '[{"schedule_id":"a","user_id":"u","every":NaN}]',
    '[{"schedule_id":"a","user_id":"u","every":' + "9" * 5000 + "}]",
    '[{"schedule_id":"a","user_id":"u","every":60,"payload":{"x":"\\ud800"}}]',
    '[{"schedule_id":"a","user_id":"u","every":60,"payload":' + '{"a":' * 40 + "1" + "}" * 41 + "]",
    '[{"schedule_id":"a\\u0000","user_id":"u","every":60}]',
    "\ufeff[]",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "- &x {schedule_id: a, payload: {y: *x}}",
    "- {schedule_id: a, user_id: u, every: 60, payload: {<<: {a: 1}}}",
    "- !!python/object/apply:os.system [ls]",
    "- {schedule_id: a, user_id: u, every: 60, payload: {x: !!binary aGk=}}",
    "- {schedule_id: a, user_id: u, every: 60, payload: {x: !!set {a, b}}}",
    "- {schedule_id: a, user_id: u, every: 60, payload: {x: 2026-01-01, 1: 2}}",
    "- {schedule_id: a, user_id: u, every: .inf}",
    "- {schedule_id: a, user_id: u, every: 1:30:00, windows: [{from: 99999:00}]}",
    "- {? {a: b} : c}",
    "- {? [a] : c}",
    "%YAML 9.9\n---\n- a",
    "--- a\n--- b",
    "\tx",
    "- a: b: c",
    "\0",
    "- 0000-99-99",
    "- 2026-01-01T99:99:99",
    "{" * 2000,
    "- " * 3000,
    "a: " * 3000,
    "!" * 5000,
    "[]" * 20_000,
    "? " * 2000,
]


@pytest.mark.parametrize("format", ["json", "yaml"])
@pytest.mark.parametrize("text", DOCUMENTS, ids=lambda text: repr(text[:40]))
def test_no_text_of_an_import_is_trusted(
    fuzzed: FuzzedWorld, redis_url: str, format: str, text: str
) -> None:
    def load() -> None:
        documents = load_schedules(text, format)
        fuzzed.scheduler.import_schedules(documents)
        assert all(
            schedule.user_id in ("u", "alice") for schedule in fuzzed.scheduler.list_schedules()
        )

    refused(fuzzed, load)
    before = fuzzed.state()
    done = Cli(redis_url).run("import", "-", "--format", format, "--dry-run", input=text)
    check_ending(done.code, done.err)
    assert changes(before, fuzzed.state()) == {}


# --- the command line -----------------------------------------------------------------------------

# They go on until somebody ends them, or wait, or listen.
ENDLESS = {"up", "demo", "dashboard", "worker", "scheduler", "top", "metrics", "bench", "doctor"}
COMMANDS = {" ".join(path): command for path, command in all_commands() if path[0] not in ENDLESS}
CODES = (0, 1, 2, 3, 4, 5, 6)


def check_ending(code: int, err: str) -> None:
    """A command ended as it should: by a known code, and with a message of one line."""
    assert code in CODES
    assert "Traceback" not in err
    assert "\0" not in err
    assert "\x1b" not in err
    if code in (1, 2, 4, 5):
        said = [line for line in err.splitlines() if line.startswith(("Error:", "fairqueue:"))]
        assert said, err
        assert len(err) < 20_000
        assert len(err.splitlines()) <= 6 + len(said), err


def arguments_of(command: click.Command) -> st.SearchStrategy[list[str]]:
    """Words for a command: something for each argument, and some of its options."""
    own = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option) and usable(p)]
    words = [texts.map(lambda text: [text]) for _ in own]
    more = st.lists(
        st.sampled_from(options).flatmap(option_words) if options else st.just([]), max_size=3
    ).map(lambda each: [word for words in each for word in words])
    ends = st.sampled_from([[], ["--"], ["--yes"], ["--dry-run"]])
    return st.tuples(more, ends, *words).map(
        lambda parts: [word for part in parts for word in part]
    )


def usable(option: click.Option) -> bool:
    """Not what leads to another server or file, goes on for ever, or asks for help."""
    unusable = {"url", "embedded", "queue", "watch", "interval", "count", "help", "file"}
    return option.name not in unusable


def option_words(option: click.Option) -> st.SearchStrategy[list[str]]:
    name = option.opts[-1]
    if option.is_flag:
        return st.just([name])
    usual = [
        "alice",
        "nine",
        "1",
        "60",
        "now",
        "2026-03-05",
        "a=1",
        "{}",
        '{"a":' * 3000,
        "[" * 9999,
    ]
    return st.one_of(texts, st.sampled_from(usual)).map(lambda text: [name, text])


DEEP = '{"a":' * 100_000
LINES = [
    ["tasks", "push", "--user", "u", "--payload", DEEP],
    ["tasks", "push", "--user", "u", "--payload", "a=" + "[" * 100_000],
    ["tasks", "push", "--user", "u", "--payload", '{"a":NaN}'],
    ["tasks", "push", "--user", "u", "--payload", '{"a":1e999}'],
    ["tasks", "push", "--user", "u", "--payload", '{"a":' + "9" * 5000 + "}"],
    ["tasks", "push", "--user", "u", "--payload", "@/dev/null"],
    ["tasks", "push", "--user", "u", "--payload", "@\0"],
    ["tasks", "push", "--user", "u", "--payload", "@/"],
    ["tasks", "push", "--user", "\ud800"],
    ["tasks", "push", "--user", "\x1b[2J"],
    ["tasks", "push", "--user", "u", "--at", "9999-12-31T23:59:59-23:59"],
    ["tasks", "push", "--user", "u", "--delay", "9" * 400 + "w"],
    ["tasks", "show", "--", "--help"],
    ["schedules", "add", "0 9 * * *", "--user", "u", "--metadata", DEEP],
    ["schedules", "add", "0 9 * * *", "--user", "u", "--window", DEEP],
    ["schedules", "add", "0 9 * * *", "--user", "u", "--window", "[" * 100_000],
    ["schedules", "add", "0 9 * * *", "--user", "u", "--backoff", DEEP],
    ["schedules", "add", "*," * 50_000 + " * * * *", "--user", "u"],
    ["schedules", "next", "0 0 29 2 1#5", "--count", "1000"],
    ["schedules", "next", "* * * * * *", "--count", "99999999999999999999"],
    ["schedules", "next", "0 9 * * *", "--after", "9999-12-31T23:59:59-23:59"],
    ["schedules", "trigger", "nine", "--payload", DEEP],
    ["settings", "max_waiting=" + "9" * 5000],
    ["settings", "=", "a", "\0=\0"],
    ["runs", "list", "--cursor", "\0", "--since", "0001-01-01"],
    ["users", "weight", "u", "nan"],
    ["users", "weight", "u", "1e999"],
    ["export", "/"],
    ["import", "/"],
    ["import", "/dev/null"],
    ["prune", "--older-than", "9" * 400 + "d", "--yes"],
    ["completion", "\0"],
    ["keys", "create", "\ud800"],
    ["--queue", "}{", "status"],
    ["--url", "redis://\0", "status"],
    ["--url", "redis://h:" + "9" * 5000, "status"],
    ["--embedded", "\0", "status"],
    ["x" * 100_000],
    ["\0"],
    ["--"],
]


@pytest.mark.untidy
@pytest.mark.parametrize("words", LINES, ids=lambda words: repr(words)[:60])
def test_no_line_breaks_the_program(fuzzed: FuzzedWorld, redis_url: str, words: list[str]) -> None:
    before = fuzzed.state()
    done = Cli(redis_url).run(*words)
    check_ending(done.code, done.err)
    if done.code:
        assert changes(before, fuzzed.state()) == {}


@pytest.mark.untidy
@pytest.mark.parametrize("name", COMMANDS)
def test_no_words_break_a_command(
    fuzzed: FuzzedWorld, redis_url: str, name: str, tmp_path: Any
) -> None:
    command = COMMANDS[name]
    cli = Cli(redis_url)

    @fuzz(5)
    @given(arguments_of(command))
    def run(words: list[str]) -> None:
        before = fuzzed.state()
        done = cli.run(*name.split(), *words, input="[]")
        check_ending(done.code, done.err)
        if done.code in (2, 4, 5):
            assert changes(before, fuzzed.state()) == {}

    here = os.getcwd()
    os.chdir(tmp_path)  # `export` writes to any file that is named
    try:
        run()
    finally:
        os.chdir(here)


# --- the REST API and the dashboard's forms -------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What an app has answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def check(self) -> None:
        """It is no crash; what is refused says so in the form of RFC 9457."""
        assert self.status < 500, (self.status, self.body[:500])
        if self.status >= 400 and "html" not in self.headers.get("content-type", ""):
            assert self.headers["content-type"] == PROBLEM, self.body[:200]
            problem = json.loads(self.body)
            assert problem["status"] == self.status
            assert problem["detail"]


def ask(
    app: ASGIApp, method: str, path: bytes, headers: list[tuple[bytes, bytes]], body: bytes = b""
) -> Answer:
    """Send bytes to an app as a server would, whatever they are. An error of the app is raised."""
    raw, _, query = path.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquoted(raw),
        "raw_path": raw,
        "query_string": query,
        "root_path": "",
        "headers": [(b"host", b"localhost"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
        "state": {},
    }
    sent: list[Message] = []
    parts = [body[: len(body) // 2], body[len(body) // 2 :]]

    async def receive() -> Message:
        if not parts:
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await app(scope, receive, send)

    asyncio.run(run())
    start = sent[0]
    got = {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}
    return Answer(start["status"], got, b"".join(m.get("body", b"") for m in sent[1:]))


def unquoted(raw: bytes) -> str:
    """A path as servers decode it."""
    plain = re.sub(rb"%([0-9a-fA-F]{2})", lambda match: bytes([int(match[1], 16)]), raw)
    return plain.decode("utf-8", "replace")


BODIES: list[bytes] = [
    *(b"", b"{", b"}", b"null", b"7", b"[]", b"[{}]", b'"x"', b"true", b"{}", b"{}{}", b"\0", b" "),
    *(b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"\xff", b'{"\xff":1}', b'{"a":"\xed\xa0\x80"}'),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"[" * 400 + b"]" * 400, b'{"payload":' * 500 + b"1"),
    *(
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":-1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
    ),
    b'{"user_id":"a","user_id":"b","payload":{"x":1,"x":2}}',
    b'{"user_id":"\\u0000"}',
    b'{"user_id":"\\ud800"}',
    b'{"user_id":"' + b"x" * 100_000 + b'"}',
    b'{"__proto__":{"a":1},"constructor":1}',
    b'{"user_id":"u","payload":{"' + b"x" * 300_000 + b'":1}}',
    b'{"user_id":"u","payload":' + b'{"a":' * 33 + b"1" + b"}" * 33 + b"}",
    b'{"user_id":"u","payload":{"a":' + b"9" * 4000 + b"}}",
    b'{"user_id":"u","every":1e308}',
    b'{"user_id":"u","at":"9999-12-31T23:59:59-23:59"}',
    b'{"user_id":"u","at":"0001-01-01T00:00:00+23:59"}',
    b'{"user_id":"u","cron_expr":"' + b"*," * 50_000 + b'"}',
    b'{"user_id":"u","cron_expr":"0 0 31 2 *"}',
    b'{"user_id":"u","cron_expr":{"minute":{"a":[]}}}',
    b'{"user_id":"u","every":60,"windows":[{"days":[1e99],"from":"25:00"}]}',
    b'{"user_id":"u","every":60,"timezone":"../../etc/passwd"}',
    b'{"documents":[{"schedule_id":"a"},7,null]}',
    b'{"action":"update","changes":{},"dry_run":false}',
    b'{"ids":["a","a","\\u0000"],"action":"remove","dry_run":false}',
    b'{"start":"2000-01-01T00:00:00Z","end":"9999-01-01T00:00:00Z","dry_run":false}',
    b'{"older_than":1e300,"dry_run":false}',
    b'{"weight":-1,"rate":1e400}',
]
TYPES: list[bytes | None] = [
    *(b"application/json", b"application/json; charset=utf-16", b"text/plain", b"", None, b"\xff"),
    *(
        b"application/x-www-form-urlencoded",
        b"multipart/form-data; boundary=",
        b"application/json,",
    ),
]
HEADERS: list[tuple[bytes, bytes]] = [
    (b"idempotency-key", b""),
    (b"idempotency-key", b"\xff\x00"),
    (b"idempotency-key", b"x" * 5000),
    (b"if-match", b'"'),
    (b"if-match", b"*"),
    (b"if-match", b'W/"\xff", "' + b"x" * 5000),
    (b"accept", b"\xff"),
    (b"accept", b"text/html;q=nan"),
    (b"accept-encoding", b"gzip" * 1000),
    (b"content-length", b"-1"),
    (b"content-length", b"99999999999999999999"),
    (b"content-encoding", b"gzip"),
    (b"transfer-encoding", b"chunked, chunked"),
    (b"x-forwarded-for", b"\x00"),
    (b"x-http-method-override", b"DELETE"),
    (b"cookie", b"fairqueue_session=\xff; =; ;;"),
    (b"origin", b"null"),
    (b"origin", b"http://[::1"),
    (b"referer", b"\xff"),
    (b"range", b"bytes=0-18446744073709551616"),
    (b"hx-request", b"\xff"),
]
WORDS = [
    *(b"%00", b"%ff", b"%2e%2e", b"..", b"%2F", b"a%2Fb", b"%0d%0aX:y", b"%ed%a0%80", b"%", b"%zz"),
    *(
        b"x" * 5000,
        b"%C3%A9" * 200,
        b"nine",
        b"waiting",
        b"alice",
        b"*",
        b"-1",
        b"{}",
        b"acme-daily",
    ),
]
QUERIES = [
    *(b"", b"?", b"?limit=", b"?limit=-1", b"?limit=99999999999999999999", b"?limit=1&limit=2"),
    *(
        b"?cursor=%00",
        b"?cursor=" + b"A" * 3000,
        b"?cursor=////",
        b"?cursor=AA",
        b"?%ff=%ff",
        b"?a" * 500,
    ),
    *(
        b"?since=9999-12-31T23:59:59-23:59",
        b"?since=x",
        b"?status=failed&status=x",
        b"?user_id=%00",
    ),
    *(
        b"?minutes=1e9",
        b"?days=366",
        b"?start=0001-01-01T00:00:00Z&end=9999-12-31T00:00:00Z",
        b"?q=%00",
    ),
    *(
        b"?cron_expr=%2A&timezone=%00",
        b"?cron_expr=0+0+31+2+*",
        b"?every=1e308&count=100",
        b"?x=" + b"%25" * 999,
    ),
]
raw_bodies = st.one_of(
    st.sampled_from(BODIES),
    st.binary(max_size=60),
    st.dictionaries(
        st.sampled_from([*SCHEDULE_FIELDS, "dry_run", "action", "documents", "role", "limit"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS[:20]),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=3,
        ),
        max_size=4,
    ).map(lambda value: json.dumps(value).encode()),
)
requests = st.fixed_dictionaries(
    {
        "word": st.sampled_from(WORDS),
        "query": st.sampled_from(QUERIES),
        "body": raw_bodies,
        "type": st.sampled_from(TYPES[:1] * 5 + TYPES),
        "headers": st.lists(st.sampled_from(HEADERS), max_size=2),
    }
)


@pytest.mark.untidy
@pytest.mark.parametrize(
    "operation", ENDPOINTS, ids=lambda operation: f"{operation.method} {operation.path}"
)
def test_no_bytes_break_the_rest_api(operation: Any, api: Api) -> None:
    key = ("Bearer " + api.keys["admin", None]).encode()

    @fuzz(7)
    @given(requests)
    def run(given: dict[str, Any]) -> None:
        path = re.sub(rb"\{\w+\}", lambda _: given["word"], operation.path.encode())
        kind = [] if given["type"] is None else [(b"content-type", given["type"])]
        before = api.state()
        answer = ask(
            api.app,
            operation.method,
            PREFIX.encode() + path + given["query"],
            [(b"authorization", key), *kind, *given["headers"]],
            b"" if operation.method == "GET" else given["body"],
        )
        if operation.path != "/ready":
            answer.check()
        if answer.status >= 400:
            assert changes(before, api.state()) == {}

    run()


@pytest.mark.untidy
@pytest.mark.parametrize(
    "credential",
    [
        *(
            b"",
            b"Bearer",
            b"Bearer ",
            b"Bearer \xff",
            b"bearer fq_",
            b"Basic " + b"A" * 5000,
            b"\x00",
        ),
        *(
            b"Bearer fq_0123456789abcdef_" + b"A" * 43,
            b"Bearer fq_" + b"x" * 100_000,
            b"Digest a=,",
        ),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_no_bytes_are_a_credential(fuzzed: FuzzedWorld, credential: bytes) -> None:
    app = create_app(fuzzed.queue, dashboard=False)
    for name, value in (
        (b"authorization", credential),
        (b"cookie", b"fairqueue_session=" + credential),
    ):
        answer = ask(app, "GET", PREFIX.encode() + b"/keys", [(name, value)])
        answer.check()
        assert answer.status == 401


def test_a_body_that_never_ends_is_refused(fuzzed: FuzzedWorld) -> None:
    """Without a length, as chunks may come."""
    app = create_app(fuzzed.queue, dashboard=False, auth=False)
    kind = [(b"content-type", b"application/json")]
    answer = ask(app, "POST", PREFIX.encode() + b"/tasks", kind, b" " * (17 * 1024 * 1024))
    assert answer.status == 413
    answer.check()


def form_routes(app: Starlette) -> list[str]:
    """The paths to which the dashboard's forms are sent."""
    found = [
        route.path
        for route in app.routes
        if isinstance(route, Route) and "POST" in (route.methods or ())
    ]
    return sorted(set(found))


FORM_FIELDS = (
    *("id", "user", "name", "payload", "cron_expr", "every", "at", "timezone", "weight", "rate"),
    *(
        "slots",
        "role",
        "note",
        "until",
        "start",
        "end",
        "limit",
        "ids",
        "next",
        "secret",
        "confirm",
    ),
    *("fingerprint", "max_running", "metadata", "kind", "rule", "changes", "if_match"),
)


def quoted(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))


forms = st.one_of(
    st.dictionaries(st.sampled_from(FORM_FIELDS), texts, max_size=6).map(
        lambda given: "&".join(
            f"{name}={quoted(text[:999])}" for name, text in given.items()
        ).encode()
    ),
    st.binary(max_size=50),
    st.just(b"a=b&" * 5000),
)


@pytest.mark.untidy
def test_no_form_breaks_the_dashboard(fuzzed: FuzzedWorld) -> None:
    app = create_app(fuzzed.queue, auth=False)
    paths = form_routes(app)
    assert len(paths) > 15
    kinds = (
        b"application/x-www-form-urlencoded",
        b"multipart/form-data; boundary=x",
        b"text/plain",
    )

    @fuzz(120)
    @given(
        st.sampled_from(paths),
        forms,
        st.sampled_from(WORDS),
        st.sampled_from(kinds[:1] * 4 + kinds),
    )
    def run(path: str, body: bytes, word: bytes, kind: bytes) -> None:
        raw = re.sub(rb"\{[^}]+\}", lambda _: word, path.encode())
        headers = [
            (b"content-type", kind),
            (b"origin", b"http://localhost"),
            (b"accept", b"text/html"),
        ]
        ask(app, "POST", raw, headers, body).check()

    run()


# --- records that somebody has planted ------------------------------------------------------------

RECORDS = [
    *(
        b"",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"7",
        b"-1",
        b"1.5",
        b"nan",
        b"inf",
        b"-inf",
        b"1e999",
        b"0x10",
    ),
    *(
        b"1e308",
        b"99999999999999999999",
        b"9" * 400,
        b'"x"',
        b"true",
        b"\0",
        b"\xff\xfe",
        b"%d%s%1",
    ),
    *(
        b"[[[[" * 200,
        b"[" * 2000 + b"]" * 2000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b"[1,null,3]",
    ),
    *(
        b'{"1":1,"999999999":2}',
        b"x" * 70_000,
        b"a\0b\0c",
        b"\x01\0\0",
        b" 5 ",
        b'{"user":"mallory"}',
    ),
]
INNER: list[Any] = [
    *(
        None,
        7,
        -1,
        1.5,
        1e308,
        10**30,
        "",
        "x",
        "nan",
        True,
        [],
        {},
        [1],
        {"a": 1},
        "\0",
        "9" * 400,
    ),
    *(-(10**15), "\ud800", [[]] * 5, nested(50)),
]
MEMBERS = [
    *(b"", b"\0", b"\0" * 3, b"\0" * 10, b"x", b"\xff", b"mallory", b"mallory\0", b"mallory\0\0\0"),
    *(b"mallory\x00300000000000001\0nobody\0default", b"%a+[", b"x" * 5000, b"\x01x\0y", b"nan"),
    *(b"9999999999999", b"{}", b"mallory\0{\0[\0}", b"o\0", b"uf\0", b"f\0\0\0"),
]
SCORES = [0.0, 1.0, -1.0, 1.5, 1.7e12, 1e308, -1e308, math.inf, -math.inf]
# Their members are found by their order, which needs that all scores are the same.
ORDERED = {
    *("backlog", "runs", "slots", "held", "slot_line", "user_names", "tenant_users", "open"),
    *("schedule_index", "schedule_names", "tenant_schedules", "moments", "changes", "audit"),
    *("samples", "rings", "gate_order", "pool_tasks", "user_tenants"),
}
# A counter by which leaders are told apart. One that is no number stops the scheduler, which says
# so: to begin anew might make an old leader's number that of a new one.
STOPS_SCHEDULER = ("epoch",)
# An unknown number stops everybody: a later version may have written the queue.
STOPS_ALL = ("fair", b"layout")

Command = tuple[Any, ...]


def is_mallorys(name: bytes) -> bool:
    return b"h-" not in name and name != b"healthy"


@dataclass(kw_only=True)
class Planted:
    """A queue of mallory, whose records can be spoilt, and of somebody healthy beside."""

    queue: TaskQueue
    clock: ManualClock
    client: redis.Redis
    app: ASGIApp
    stored: dict[bytes, bytes] = field(default_factory=dict)
    began_ms: int = 0

    def keep(self) -> None:
        """Remember all, to begin anew from here."""
        keys = cast(list[bytes], self.client.keys("*"))
        self.stored = {key: cast(bytes, self.client.dump(key)) for key in keys}
        self.began_ms = self.clock.now_ms()

    def begin(self) -> None:
        self.clock.set(self.began_ms / 1000)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.flushdb()
            for key, value in self.stored.items():
                pipe.restore(key, 0, value)
            pipe.execute()

    def commands(self) -> Iterator[tuple[str, Command]]:
        """All ways to spoil one thing: a label and a command."""
        for key in OWN_KEYS:
            kind, name = KEY_TYPES[key], self.queue.keys[key]
            if kind == "hash":
                yield from self._of_hash(key, name)
            elif kind == "zset":
                yield from self._of_zset(key, name)
            else:
                for value in RECORDS:
                    word = "SET" if kind == "string" else "RPUSH"
                    yield f"{key} {value[:30]!r}", (word, name, value)

    def _of_hash(self, key: str, name: bytes) -> Iterator[tuple[str, Command]]:
        stored = cast(dict[bytes, bytes], self.client.hgetall(name))
        own = {
            each: text
            for each, text in stored.items()
            if is_mallorys(each) and (key, each) != STOPS_ALL
        }
        for each in (*own, b"", b"m-none", b"\xff\0", b"mallory"):
            for value in RECORDS:
                yield f"{key}[{each!r}] = {value[:30]!r}", ("HSET", name, each, value)
        for each, text in own.items():
            if not text.startswith(b"{"):
                continue
            record = json.loads(text)
            for inner in (*record, *EXTRA):
                for value in INNER:
                    spoilt = json.dumps({**record, inner: value})
                    label = f"{key}[{each!r}].{inner} = {repr(value)[:30]}"
                    yield label, ("HSET", name, each, spoilt)
                less = json.dumps(
                    {other: value for other, value in record.items() if other != inner}
                )
                yield f"{key}[{each!r}] without {inner}", ("HSET", name, each, less)

    def _of_zset(self, key: str, name: bytes) -> Iterator[tuple[str, Command]]:
        stored = cast(list[bytes], self.client.zrange(name, 0, -1))
        scores = [0.0] if key in ORDERED else SCORES
        for member in filter(is_mallorys, stored):
            yield f"{key} without {member!r}", ("ZREM", name, member)
            for score in [] if key in ORDERED else scores:
                yield f"{key} {member!r} at {score}", ("ZADD", name, score, member)
            parts = member.split(b"\0")
            for place in range(len(parts)):
                for junk in (b"", b"x", b"9" * 20, b"\xff", b"{", b"nan"):
                    spoilt = b"\0".join([*parts[:place], junk, *parts[place + 1 :]])
                    yield f"{key} {spoilt[:60]!r}", ("ZADD", name, 0, spoilt)
        for member in MEMBERS:
            for score in scores:
                yield f"{key} {member[:60]!r} at {score}", ("ZADD", name, score, member)


EXTRA = (
    *("slot", "deadline", "stale", "cancel", "buffered", "retried_as", "timed_out", "tenant"),
    *("fail_limit", "until", "reason", "drain", "policy", "parent", "ends", "result", "error"),
    *("group", "pool", "flow", "behind", "expires", "following"),
)


def fill(world: World) -> None:
    """One of everything that mallory can have, and a schedule and tasks of somebody healthy."""
    access = AccessStore(world.queue.link)
    access.create_key("mallory", "viewer", by="test")
    access.redeem(access.create_login(Actor(name="mallory")))
    world.queue.configure(keep_finished=500)
    world.queue.set_user("mallory", weight=2.0, max_running=50, rate=100.0, tenant="acme")
    world.queue.set_limits("slow", slots=1, rate=100.0, timeout=60.0)
    world.queue.set_tenant("acme", weight=2.0, max_running=60, rate=200.0)
    world.queue.set_limit("account:*", slots=1, ordered=True)
    world.queue.set_limit("site", slots=1, rate=100.0, scope="tenant")
    _fill_tasks(world)
    scheduler = TaskScheduler(world.queue, "one", registry=CollectorRegistry())
    rule: dict[str, Any] = {"user_id": "mallory", "tenant": "acme"}
    scheduler.add_schedule(
        "* * * * *", schedule_id="m-cron", overlap="buffer_one", misfire="fire_all", **rule
    )
    scheduler.add_schedule(
        every=30, schedule_id="m-every", overlap="skip", max_failures=3, retries=1, **rule
    )
    scheduler.add_schedule("0 9 * * *", schedule_id="m-paused", **rule)
    scheduler.pause_schedule("m-paused", by="mallory", note="x")
    for _ in range(2):
        world.advance(60)
        scheduler.tick()
    scheduler.update_schedule("m-cron", payload={"b": 2}, changed_by="mallory")
    replies = ReplyStore(world.queue.link)
    token = replies.begin("mallory-key", "d").token
    replies.done("mallory-key", 200, {}, "x", token=token)
    replies.begin("mallory-open", "d")
    Inspector(world.queue, Actor(name="mallory")).users.set("mallory", weight=3.0)
    SampleStore(world.queue.link).take()
    worker = {"host": "h", "pid": 1, "version": "0", "slots": 2, "names": ["*"], "current": []}
    WorkerStore(world.queue.link).beat(
        {**worker, "running": 0, "started": 1_700_000_000_000}, "mallory-worker"
    )
    scheduler.add_schedule(every=60, user_id="healthy", schedule_id="h-every")
    world.push("h-1", "h-2", user_id="healthy")
    world.advance(60)  # so that the term of the leader is over


def _fill_tasks(world: World) -> None:
    world.push("m-dead", "m-done", "m-cancelled", user_id="mallory", tenant="acme")
    world.queue.bury(world.claim_one(), "boom: 7")
    world.queue.finish(world.claim_one(), {"a": 1})
    world.queue.cancel("m-cancelled")
    world.push("m-retried", user_id="mallory")
    world.queue.retry(world.claim_one(), "no", 5)
    world.push("m-slow-1", "m-slow-2", user_id="mallory", name="slow")
    world.claim_one()
    world.queue.claim("w")
    world.push_and_claim("m-running", user_id="mallory")
    world.push("m-waiting", user_id="mallory", payload={"a": [1, 2]})
    world.push("m-later", user_id="mallory", delay=3600)
    world.push("m-critical", user_id="mallory", priority=6)
    _fill_flow(world)


def _fill_flow(world: World) -> None:
    """Tasks with keys, of another pool, unique ones, and some that expire."""
    for tenant in (None, "acme"):
        acme: dict[str, Any] = {"user_id": "mallory", "tenant": tenant}
        kind = "t" if tenant else "u"
        keys = {"limit_keys": ["account:7", "site"], **acme}
        world.push(f"m-key-{kind}1", f"m-key-{kind}2", f"m-key-{kind}3", **keys)
        world.claim_one()
        world.queue.claim("w", limit=2)
        world.push(f"m-gpu-{kind}1", f"m-gpu-{kind}2", pool="gpu", **acme)
        world.queue.claim("w", pools=["gpu"])
        world.push(f"m-one-{kind}", unique="one", **acme)
        world.push(f"m-two-{kind}", unique="one", **acme)
        world.push(f"m-late-{kind}", unique="late", debounce=600.0, **acme)
        world.push(f"m-short-{kind}", expires=90, cost=2.5, **acme)
        world.push(f"m-long-{kind}", expires=9000, delay=3600, **acme)


@pytest.fixture
def planted(world: World) -> Planted:
    fill(world)
    app = create_app(world.queue, auth=False, rate=1e6, burst=1_000_000)
    planted = Planted(queue=world.queue, clock=world.clock, client=world.redis, app=app)
    planted.keep()
    return planted


def calmly(call: Callable[..., object], *arguments: str) -> None:
    """Make a call, which may say that a record is broken."""
    try:
        call(*arguments)
    except (BrokenRecord, RedisRefused):
        return


def go_on(planted: Planted, *, fires: bool = True) -> None:
    """The healthy one's schedule fires, and all of its tasks run, old ones and new ones."""
    queue, ran = planted.queue, []
    scheduler = TaskScheduler(queue, "two", registry=CollectorRegistry())
    worker = Worker(
        queue, lambda task: ran.append(task.task_id), worker_id="w2", registry=CollectorRegistry()
    )
    for _ in range(2):
        planted.clock.advance(61)
        for _ in range(3):
            scheduler.tick() if fires else calmly(scheduler.tick)
        queue.push(make_task("healthy", f"h-{planted.clock.now_ms()}"))
        for _ in range(20):  # a pass that meets only an unreadable task runs none
            worker.run_once()
    healthy = [task_id for task_id in ran if task_id.startswith("h-")]
    fired = [task_id for task_id in healthy if task_id.startswith("h-every:")]
    assert {"h-1", "h-2"} <= set(healthy), ran
    assert len(healthy) - len(fired) == 4, ran
    assert len(set(healthy)) == len(healthy)
    assert len(fired) >= 1 or not fires, ran


def look(planted: Planted) -> None:
    """Everything that is read of a queue can be read."""
    queue = planted.queue
    scheduler = TaskScheduler(queue, "three", registry=CollectorRegistry())
    queue.inspect()
    queue.settings()
    queue.get_limits()
    scheduler.list_schedules()
    scheduler.problems()
    scheduler.export_schedules()
    scheduler.health()
    History(queue).runs()
    History(queue).failure_groups()
    Doctor(queue).examine()
    WorkerStore(queue.link).alive()
    calmly(queue.get_user, "mallory")
    for task_id in ("m-dead", "m-waiting", "m-running", "m-done", "m-slow-1", "m-later"):
        calmly(queue.get, task_id)
        calmly(queue.explain, task_id)
        calmly(History(queue).get, task_id)
    for schedule_id in ("m-cron", "m-every", "m-paused"):
        calmly(scheduler.get_schedule, schedule_id)
        calmly(scheduler.changes, schedule_id)


IDS = {
    "schedule_id": "m-cron",
    "task_id": "m-dead",
    "user_id": "mallory",
    "worker_id": "w",
    "name": "slow",
    "key_id": "x",
    "tenant": "acme",
}
SPAN = "start=2023-11-14T00:00:00Z&end=2023-11-15T00:00:00Z"
READS = [
    *(f"{PREFIX}{each.path.format(**IDS)}" for each in ENDPOINTS if each.method == "GET"),
    f"{PREFIX}/scheduler/jobs/m-cron/moments?{SPAN}",
    *(
        f"{PREFIX}/tasks/{each}"
        for each in ("m-waiting", "m-waiting/explain", "m-running", "m-done")
    ),
    f"{PREFIX}/scheduler/jobs/m-every",
]
PAGES = [
    *("/", "/users", "/users/mallory", "/schedules", "/schedules/m-cron", "/runs", "/runs/m-dead"),
    *("/failed", "/audit", "/workers", "/settings", "/search?q=m", "/charts/users/shares"),
    *("/charts/runs", "/runs/m-waiting", "/do/schedules/edit?id=m-cron", "/failed/export"),
    *("/tenants", "/tenants/acme", "/users/mallory?tenant=acme"),
]


def see(planted: Planted, path: str) -> None:
    """A path can be read. What is about the broken record alone may say that it is broken."""
    page = not path.startswith(PREFIX)
    kind = b"text/html" if page else b"application/json"
    answer = ask(planted.app, "GET", path.encode(), [(b"accept", kind)])
    if answer.status == 500:
        assert re.search(rb"broken-record|Broken record", answer.body), (path, answer.body[:300])
        assert b"m-" in path.encode() or "mallory" in path, path
    elif answer.status == 503:
        assert path.endswith("/ready"), (path, answer.body[:300])


@pytest.mark.untidy
def test_the_healthy_go_on_beside_mallory(planted: Planted) -> None:
    """What proves the other tests: with nothing planted all is well, and all can be seen."""
    go_on(planted)
    look(planted)
    for path in (*READS, *PAGES):
        see(planted, path)


OWN_KEYS = [name for name in KEY_TYPES if name != BARRIER]
GROUPS = 4  # the keys in so many tests, each of which has to make a queue first
PLANTS = 4  # things that are spoilt at a time


@contextmanager
def telling(*words: object) -> Iterator[None]:
    """Say with a failure what it was about."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while this was planted: {words}")
        raise


@pytest.mark.untidy
@pytest.mark.parametrize("group", range(GROUPS))
def test_planted_records_hurt_nobody_else(planted: Planted, group: int) -> None:
    commands = list(planted.commands())
    for key in OWN_KEYS[group::GROUPS]:
        listed = [each for each in commands if each[1][1] == planted.queue.keys[key]]
        for number in range(EXAMPLES or 1):
            random = Random(f"{key} {number}")
            plants = random.sample(listed, PLANTS)
            with telling(*(label for label, _ in plants)):
                planted.begin()
                for _, command in plants:
                    planted.client.execute_command(*command)
                go_on(planted, fires=key not in STOPS_SCHEDULER)
                look(planted)
                for path in random.sample(READS, 4) + random.sample(PAGES, 2):
                    see(planted, path)


@pytest.mark.untidy
def test_a_task_whose_id_is_no_text_is_buried_and_the_others_run(planted: Planted) -> None:
    client, keys = planted.client, planted.queue.keys
    for key in ("status", "tasks"):
        record = cast(bytes, client.hget(keys[key], "h-1"))
        client.hset(keys[key], b"\xff", record)
    members = cast(list[bytes], client.zrange(keys["backlog"], 0, -1))
    (member,) = (each for each in members if b"h-1" in each)
    client.zadd(keys["backlog"], {member.replace(b"h-1", b"\xff"): 0})
    go_on(planted)
    assert client.zscore(keys["dead"], b"\xff") is not None


@pytest.mark.untidy
def test_a_key_of_another_type_is_refused_by_name(planted: Planted) -> None:
    """Then nobody can go on; but nothing crashes, and the error names the key."""
    queue = planted.queue
    scheduler = TaskScheduler(queue, registry=CollectorRegistry())
    calls: list[Callable[[], object]] = [
        *(queue.inspect, queue.settings, queue.get_limits, lambda: queue.push(make_task())),
        *(lambda: queue.claim("w"), lambda: History(queue).runs(), lambda: queue.cancel("m-later")),
        *(scheduler.tick, lambda: queue.explain("m-waiting"), lambda: Doctor(queue).examine()),
    ]
    for number, key in enumerate(OWN_KEYS):
        name = queue.keys[key]
        planted.begin()
        planted.client.delete(name)
        planted.client.sadd(name, "x")
        with telling(key):
            refusals = list(filter(None, map(refusal, calls)))
            assert all(name.decode() in each for each in refusals), refusals
            for path in (READS[number % len(READS)], PAGES[number % len(PAGES)]):
                answer = ask(planted.app, "GET", path.encode(), [])
                assert answer.status < 500 or b"refused" in answer.body.lower(), answer.body[:300]


def refusal(call: Callable[[], object]) -> str | None:
    """What Redis has said no to; None if it did not."""
    try:
        call()
    except RedisRefused as error:
        return str(error)
    return None
