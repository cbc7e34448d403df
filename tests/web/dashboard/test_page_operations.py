"""The pages about workers, the audit log and settings over HTTP: what they show, do and refuse."""

import html
import json
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from helpers.browser import Site, Web
from helpers.pages import HTML, HTMX, get, key, post, said, words
from helpers.schedules import tamper
from helpers.tasks import make_task
from helpers.world import World

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import Actor
from fairqueue.clock import ManualClock
from fairqueue.errors import UnknownSchedule
from fairqueue.inspection import Inspector
from fairqueue.inspection.views import RedisInfo
from fairqueue.models import QueueSettings
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.web.dashboard.pages.settings import MEANINGS, rows
from fairqueue.web.dashboard.pages.workers import check_redis

START = datetime(2026, 3, 5, 8, 0, tzinfo=UTC)
XSS = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
RATE: dict[str, Any] = {"rate": 1000.0, "burst": 1000}


@pytest.fixture
def inspector(queue: TaskQueue) -> Inspector:
    return Inspector(queue, Actor(name="ann"))


def beat(world: World, worker_id: str = "worker-1", **more: Any) -> None:
    """Let a worker report that it is alive."""
    fields = {
        "host": "host-1",
        "pid": 4711,
        "version": "1.2.3",
        "slots": 8,
        "names": ["mails.send"],
    }
    world.beat(worker_id, **fields | {"started": world.clock.now_ms()} | more)


def actions(inspector: Inspector) -> list[tuple[str, str, str]]:
    """What the audit log says, oldest first."""
    return [(e.action, e.target, e.outcome) for e in inspector.audit.list()][::-1]


# --- workers --------------------------------------------------------------------------------------


def test_workers_are_shown_with_what_they_do(web: Web, world: World) -> None:
    current = [f"run-{n}" for n in range(7)]
    beat(world, current=current, running=7, names=[f"task-{n}" for n in range(9)])
    beat(world, "worker-2", names=["*"])

    text = get(web(), "/workers")
    told = words(text)

    assert "7 of 8" in told
    assert "0 of 8" in told
    assert "host-1, process 4711, version 1.2.3" in told
    assert "and 2 more" in told
    assert "task-7 and 1 more" in told
    assert re.search(r'href="/runs/run-0"[^>]*>run-0<', text)
    assert 'width="87.50"' in text
    assert "fairqueue workers drain worker-1" in told


def test_a_page_without_workers_says_how_to_start_one(web: Web, queue: TaskQueue) -> None:
    text = words(get(web(), "/workers"))

    assert "No worker is running" in text
    assert "fairqueue worker --app" in text
    assert "No scheduler is running. None is needed" in text
    assert "No task name has limits" in text


@pytest.mark.one_partition
def test_no_leader_is_an_alarm(site: Site, inspector: Inspector, clock: ManualClock) -> None:
    inspector.schedules.add(cron_expr="0 9 * * *", user_id="alice", schedule_id="nine")

    before = words(get(site, "/workers"))
    TaskScheduler(inspector.queue, "one").tick()
    leads = words(get(site, "/workers"))
    clock.advance(3600)
    over = words(get(site, "/workers"))

    assert "No scheduler is running: 1 schedule does not fire" in before
    assert re.search(r"one leader Term [\d.]+ s left, renewed continuously; number 1", leads)
    assert "term has ended" in over


@pytest.mark.untidy
def test_disabled_schedules_are_named(web: Web, inspector: Inspector, world: World) -> None:
    inspector.schedules.add(cron_expr="0 9 * * *", user_id="alice", schedule_id="nine")
    tamper(world.redis, inspector.queue, "nine", cron_expr="nonsense")
    world.advance(3600)
    TaskScheduler(inspector.queue, "one").tick()

    text = get(web(), "/workers")

    assert 'href="/schedules/nine"' in text[text.index("cannot run") :]


def test_a_worker_is_drained(site: Site, world: World, inspector: Inspector) -> None:
    beat(world)

    before = get(site, "/workers")
    answer = post(site, "/do/workers/drain", id="worker-1")
    text = get(site, "/workers")

    assert "This is the last worker" in before
    assert "takes no more tasks" in said(answer)
    assert "draining" in words(text)
    assert "drain-1" not in text
    assert actions(inspector) == [("worker.drain", "worker-1", "done")]
    post(site, "/do/workers/drain", 404, id="nobody")
    assert actions(inspector)[-1] == ("worker.drain", "nobody", "failed")


GOOD = RedisInfo(
    version="7.4.0",
    server="Redis",
    used_memory=10,
    max_memory=100,
    policy="noeviction",
    appendonly=True,
    appendfsync="everysec",
    last_save_ok=True,
    replicas=1,
    clients=3,
    uptime=60.0,
    round_trip=0.001,
    clock_skew=0.01,
)


def test_a_server_that_is_well_is_called_so() -> None:
    found = check_redis(GOOD)

    assert {each.level for each in found} == {"ok"}
    assert {each.advice for each in found} == {""}
    assert [each.name for each in found] == [
        "Server", "Memory", "Eviction", "Persistence", "Last save", "Replicas", "Clients",
        "Round trip", "Clock",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name", "level", "advice"),
    [
        ({"used_memory": 85}, "Memory", "warning", "raise maxmemory"),
        ({"used_memory": 97}, "Memory", "error", "raise maxmemory"),
        ({"max_memory": 0}, "Memory", "ok", "Set maxmemory"),
        ({"policy": "allkeys-lru"}, "Eviction", "error", "noeviction"),
        ({"policy": "volatile-ttl"}, "Eviction", "ok", ""),
        ({"appendonly": False}, "Persistence", "warning", "appendonly yes"),
        ({"appendfsync": "no"}, "Persistence", "warning", "everysec"),
        ({"appendfsync": "?"}, "Persistence", "ok", ""),
        ({"last_save_ok": False}, "Last save", "error", "disk"),
        ({"replicas": 0}, "Replicas", "ok", "if this server is lost"),
        ({"round_trip": 0.2}, "Round trip", "warning", "SLOWLOG"),
        ({"clock_skew": -3.0}, "Clock", "warning", "NTP"),
    ],
)
def test_what_is_wrong_with_a_server_is_said_with_what_to_do(
    change: dict[str, Any], name: str, level: str, advice: str
) -> None:
    (found,) = [each for each in check_redis(replace(GOOD, **change)) if each.name == name]

    assert found.level == level
    assert advice in found.advice


def test_limits_are_set_and_removed(site: Site, queue: TaskQueue, inspector: Inspector) -> None:
    set_ = post(site, "/do/limits", name="mails.send", slots="3", rate="2.5", timeout="")
    texts = [words(get(site, path)) for path in ("/workers", "/settings")]
    limits = inspector.system.limits()["mails.send"]
    gone = post(site, "/do/limits", name="mails.send", slots="", rate="", timeout="")

    assert (limits.slots, limits.rate, limits.timeout) == (3, 2.5, None)
    assert all("mails.send 3 2.5 none" in text for text in texts)
    assert said(set_) == "The limits of mails.send apply from now on."
    assert said(gone).startswith("mails.send is no longer limited")
    assert inspector.system.limits() == {}
    assert actions(inspector) == [("limits.change", "mails.send", "done")] * 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "a", "slots": "many"}, "many"),
        ({"name": "a", "slots": "-1"}, "slots"),
        ({"name": "a", "rate": "-1"}, "rate"),
        ({"name": "", "slots": "1"}, "name"),
    ],
)
def test_limits_that_cannot_be_used_are_named_beside_their_fields(
    web: Web, inspector: Inspector, fields: dict[str, str], told: str
) -> None:
    answer = web().http.post("/do/limits", data=fields, headers=HTMX)

    assert answer.status_code == 422
    assert told in answer.text
    assert told in json.loads(answer.headers["HX-Trigger"])["toast"]["text"]
    assert inspector.system.limits() == {}


def test_limits_of_keys_are_set_and_removed(site: Site, inspector: Inspector) -> None:
    fields = {"slots": "1", "rate": "2.5", "order": "retries", "scope": "tenant"}
    set_ = post(site, "/do/limits/keys", key="account:*", **fields)

    (limits,) = inspector.system.key_limits().values()
    text = words(get(site, "/settings"))
    gone = post(site, "/do/limits/keys/remove", key="account:*")
    again = post(site, "/do/limits/keys/remove", key="account:*")

    assert (limits.slots, limits.rate, limits.scope) == (1, 2.5, "tenant")
    assert (limits.ordered, limits.through_retries) == (True, True)
    assert "account:* 1 2.5 as pushed, also through retries in each tenant" in text
    assert said(set_) == "The limits of account:* apply from now on."
    assert said(gone) == "The limits of account:* are removed."
    assert said(again) == "account:* has no limits."
    assert inspector.system.key_limits() == {}
    assert "No key has limits" in get(site, "/workers")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"key": "a", "slots": "", "rate": ""}, "needs slots or rate"),
        ({"key": "a", "slots": "0"}, "slots must be"),
        ({"key": "a", "slots": "many"}, "slots must be a whole number, not 'many'"),
        ({"key": "a", "rate": "nan"}, "rate must be"),
        ({"key": "a*b", "slots": "1"}, "'a*b'"),
        ({"key": "", "slots": "1"}, "key"),
        ({"key": "a", "slots": "1", "scope": "world"}, "'world'"),
    ],
)
def test_limits_of_keys_that_cannot_be_used_are_named(
    web: Web, inspector: Inspector, fields: dict[str, str], told: str
) -> None:
    answer = web().http.post("/do/limits/keys", data={"scope": "queue"} | fields, headers=HTMX)

    assert answer.status_code == 422
    assert told in html.unescape(answer.text)
    assert inspector.system.key_limits() == {}


def test_pools_are_told_with_who_serves_them(site: Site, world: World) -> None:
    beat(world)
    world.queue.push(make_task("alice", "a", pool="gpu"))
    world.queue.push(make_task("alice", "b"))

    text = words(get(site, "/workers"))
    overview = words(get(site, "/"))

    assert "No live worker serves it. Start one: fairqueue worker --app tasks --pool gpu" in text
    assert "No live worker serves the pool 'gpu': a task waits." in overview
    assert "Pool Waiting Workers Slots in use default 1 1" in overview
    beat(world, "worker-2", pools=["gpu"])
    assert "No live worker serves it" not in get(site, "/workers")


def test_a_queue_with_one_pool_has_no_card_of_pools_on_the_overview(
    site: Site, world: World
) -> None:
    beat(world)
    world.queue.push(make_task("alice", "a"))

    assert 'id="pools"' not in get(site, "/")


# --- audit ----------------------------------------------------------------------------------------


def furnish_log(inspector: Inspector, world: World) -> None:
    """A change that was made, one that failed, and one of which nobody knows."""
    inspector.schedules.add(
        cron_expr="0 9 * * *",
        user_id="alice",
        schedule_id="nine",
        tenant="north",
        payload={"api_key": "k-123"},
    )
    world.advance(7200)
    with pytest.raises(UnknownSchedule):
        inspector.acting_as(Actor(name="ole", role="operator", via="cli")).schedules.pause("ten")
    world.advance(60)
    AuditLog(inspector.queue.link).begin(inspector.actor, "user.set", "bob", details={"weight": 2})


def test_the_log_tells_who_did_what(web: Web, inspector: Inspector, world: World) -> None:
    furnish_log(inspector, world)

    text = get(web(), "/audit")
    told = [words(row) for row in text[text.index("<tbody>") :].split("<tr>")[1:]]

    assert "user.set bob – started" in told[0]
    assert '"weight": 2' in told[0]
    assert "nine north done" in told[-1]
    assert "k-123" not in text
    assert "ann admin, via python" in told[0]


def test_a_change_that_failed_is_there_with_its_reason(web: Web, inspector: Inspector) -> None:
    inspector.queue.push(make_task("alice", "a"))
    with pytest.raises(Exception, match="ageing"):
        inspector.system.configure(ageing=5)

    text = words(get(web(), "/audit"))

    assert "settings.change default – failed ageing 5 can be set only" in text


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["user.set", "schedule.add"]),
        ({"action": "schedule."}, ["schedule.add"]),
        ({"actor": "ann"}, ["user.set", "schedule.add"]),
        ({"actor": "ole"}, []),
        ({"target": "bob"}, ["user.set"]),
        ({"tenant": "north"}, ["schedule.add"]),
        ({"last": "1h"}, ["user.set"]),
        ({"since": "2026-03-05T09:00"}, ["user.set"]),
        ({"until": "2026-03-05T09:00"}, ["schedule.add"]),
    ],
)
def test_entries_are_filtered_by_the_address(
    web: Web, inspector: Inspector, world: World, query: dict[str, str], found: list[str]
) -> None:
    furnish_log(inspector, world)

    text = get(web(), "/audit", **query)

    assert re.findall(r"<code>([a-z]+\.[a-z]+)</code>", text) == found
    if not found:
        assert "No entry matches" in text


def test_the_command_line_says_the_same_filters(web: Web) -> None:
    text = html.unescape(get(web(), "/audit", action="run.", last="24h"))

    assert "fairqueue audit --action run. --since 24h" in text


def test_an_empty_log_says_what_will_stand_there(web: Web) -> None:
    assert "There are no changes yet" in get(web(), "/audit")


def test_pages_of_the_log_follow_each_other(site: Site, inspector: Inspector) -> None:
    for number in range(55):
        inspector.users.set(f"user-{number:02}", weight=2)

    first = get(site, "/audit")
    more = re.search(r'rel="next" href="([^"]+)"', first)
    assert more
    second = get(site, "/audit" + html.unescape(more[1]))

    found = re.findall(r'<td class="wrap">(user-\d\d)</td>', first + second)
    assert found == [f"user-{number:02}" for number in reversed(range(55))]
    assert 'rel="next"' not in second


@pytest.mark.parametrize("query", [{"since": "never"}, {"cursor": "x"}, {"tenant": "no one!"}])
def test_bad_filters_of_the_log_are_named(web: Web, query: dict[str, str]) -> None:
    text = get(web(), "/audit", 422, **query)

    assert re.search(r'role="alert">.*' + next(iter(query)), text, re.S)


# --- settings -------------------------------------------------------------------------------------


def test_every_setting_is_explained() -> None:
    defaults = asdict(QueueSettings())

    assert set(MEANINGS) == set(defaults)
    for row in rows(defaults):
        assert not row.is_changed
        kind = MEANINGS[row.name][0]
        assert kind.read(row.typed, row.name) == defaults[row.name]


def test_changed_settings_are_marked(web: Web, queue: TaskQueue) -> None:
    queue.configure(max_waiting=500)

    text = words(get(web(), "/settings"))

    assert "500 changed 0" in text
    assert text.count(" changed 0") == 1
    assert "FairQueue" in text
    assert "htmx.org 4." in text


@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "-1e400", "nan", "inf", "[]", "x", ""])
def test_unreadable_settings_show_as_the_defaults(site: Site, world: World, value: str) -> None:
    fields = ("max_attempts", "keep_dead_ms", "ageing_ms", "critical_share")
    world.redis.hset(world.keys["settings"], mapping=dict.fromkeys(fields, value))

    assert world.queue.settings() == QueueSettings()
    for path in ("/settings", "/api/v1/settings"):
        assert get(site, path)


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("max_waiting", "500", 500),
        ("keep_finished_for", "12h", 43_200.0),
        ("critical_share", "0.25", 0.25),
        ("cost", "time", "time"),
    ],
)
def test_a_setting_is_changed(
    web: Web, inspector: Inspector, name: str, value: str, stored: Any
) -> None:
    answer = post(web(), "/do/settings", name=name, value=value)

    assert inspector.system.settings()["settings"][name] == stored
    assert said(answer) == f"{name} is now {value}."
    assert actions(inspector) == [("settings.change", "default", "done")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_waiting", "many"),
        ("max_waiting", "-1"),
        ("max_waiting", ""),
        ("keep_finished_for", "soon"),
        ("critical_share", "2"),
        ("critical_share", "half"),
        ("cost", "money"),
        ("colour", "red"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_beside_its_field(
    web: Web, inspector: Inspector, name: str, value: str
) -> None:
    answer = web().http.post("/do/settings", data={"name": name, "value": value}, headers=HTMX)

    assert answer.status_code == 422
    assert name in answer.text
    assert inspector.system.settings()["settings"] == asdict(QueueSettings())


def test_a_keys_secret_is_shown_once(web: Web, queue: TaskQueue, inspector: Inspector) -> None:
    site = web(auth=True, **RATE)
    admin = key(site)

    made = site.http.post(
        "/do/keys/create",
        data={"name": "ci", "role": "operator", "tenant": "north", "expires_in": "30d"},
        headers=admin,
    )
    secret = re.search(r'id="secret"[^>]*>(fq_[0-9a-f]{16}_[^<]{43})<', made.text)

    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    assert secret
    assert "It is not shown again" in made.text
    assert secret[1] not in site.http.get("/settings", headers=admin).text
    used = site.http.get("/runs", headers={**HTML, "Authorization": f"Bearer {secret[1]}"})
    assert used.status_code == 200
    info = next(each for each in inspector.keys.list() if each.name == "ci")
    assert (info.role, info.tenant) == ("operator", "north")
    assert info.expires_at == START + timedelta(days=30)
    assert actions(inspector) == [("key.create", "ci", "done")]
    assert secret[1] not in repr(inspector.audit.list())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": ""}, "name of a key"),
        ({"name": "a\x07"}, "name of a key"),
        ({"role": "king"}, "king"),
        ({"tenant": "no one!"}, "no one!"),
        ({"expires_in": "soon"}, "soon"),
    ],
)
def test_a_key_that_cannot_be_made_keeps_what_was_typed(
    web: Web, inspector: Inspector, change: dict[str, str], told: str
) -> None:
    typed = {"name": "ci", "role": "viewer", "tenant": "north", "expires_in": "30d"} | change

    text = post(web(), "/do/keys/create", 422, **typed).text

    assert re.search(rf'id="key-error">.*{told}', html.unescape(text), re.S)
    assert f'name="tenant" value="{typed["tenant"]}"' in html.unescape(text)
    assert inspector.keys.list() == []


def test_a_key_is_revoked(site: Site, inspector: Inspector) -> None:
    key_id = inspector.keys.create("ci", "viewer").info.key_id

    first = post(site, "/do/keys/revoke", id=key_id)
    second = post(site, "/do/keys/revoke", id=key_id)

    assert said(first).startswith("The key was revoked")
    assert said(second) == "The key no longer exists."
    assert inspector.keys.list() == []
    post(site, "/do/keys/revoke", 422, id="nonsense")


def test_without_keys_the_page_says_how_to_make_one(web: Web) -> None:
    assert "fairqueue keys create" in get(web(), "/settings")


# --- who may --------------------------------------------------------------------------------------

CHANGES = {
    "/do/workers/drain": ({"id": "worker-1"}, "operator"),
    "/do/limits": ({"name": "a", "slots": "1"}, "admin"),
    "/do/limits/keys": ({"key": "a", "slots": "1", "scope": "queue"}, "admin"),
    "/do/limits/keys/remove": ({"key": "account:42"}, "admin"),
    "/do/settings": ({"name": "max_waiting", "value": "5"}, "admin"),
    "/do/keys/create": ({"name": "ci", "role": "viewer"}, "admin"),
    "/do/keys/revoke": ({"id": "0" * 16}, "admin"),
}


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_viewers_see_no_buttons(web: Web, world: World, inspector: Inspector, role: str) -> None:
    beat(world)
    world.queue.set_limits("mails.send", slots=1)
    world.queue.set_limit("account:42", slots=1)
    site = web(auth=True, **RATE)
    who = key(site, role=role)

    pages = {path: site.http.get(path, headers=who).text for path in ("/workers", "/settings")}

    assert ("drain-1" in pages["/workers"]) is (role == "operator")
    for text in pages.values():
        assert "/do/limits" not in text
        assert "/do/settings" not in text
        assert "API keys" not in text
    for path, (fields, least) in CHANGES.items():
        if least == "admin" or role == "viewer":
            assert site.http.post(path, data=fields, headers=who).status_code == 403
    assert inspector.system.settings()["settings"] == asdict(QueueSettings())
    assert [*inspector.system.key_limits()] == ["account:42"]
    assert not inspector.workers.list()[0].draining


def test_a_read_only_dashboard_shows_keys_and_changes_none(web: Web, inspector: Inspector) -> None:
    inspector.keys.create("ci", "viewer")
    site = web(read_only=True)

    text = get(site, "/settings")

    assert "API keys" in text
    assert "data-dialog" not in text
    assert 'method="post"' not in text[text.index("<main") :]
    for path, (fields, _) in CHANGES.items():
        post(site, path, 403, **fields)


def test_shared_data_is_not_for_one_tenant(web: Web, world: World, inspector: Inspector) -> None:
    beat(world)
    furnish_log(inspector, world)
    site = web(auth=True, **RATE)
    nora = key(site, tenant="north")

    for path in ("/workers", "/settings"):
        answer = site.http.get(path, headers=nora)
        assert answer.status_code == 403
        assert "need a key without a tenant" in answer.text
        assert "Go back" in answer.text
    log = site.http.get("/audit", headers=nora).text
    assert 'href="/workers"' not in log
    assert 'href="/settings"' not in log
    assert re.findall(r"<code>([a-z]+\.[a-z]+)</code>", log) == ["schedule.add"]
    assert site.http.get("/audit?tenant=south", headers=nora).status_code == 403
    for path, (fields, _) in CHANGES.items():
        assert site.http.post(path, data=fields, headers=nora).status_code == 403


# --- hostile texts --------------------------------------------------------------------------------


def test_texts_of_others_are_shown_as_text(site: Site, world: World, inspector: Inspector) -> None:
    beat(world, XSS, host=XSS, version=XSS, names=[XSS], current=[XSS], running=1)
    world.queue.set_limits(XSS, slots=1)
    world.queue.set_limit(XSS, slots=1)
    world.queue.push(make_task("alice", pool=XSS))
    inspector.keys.create(XSS, "viewer")
    inspector.acting_as(Actor(name=XSS)).users.set(XSS, weight=2)

    texts = [get(site, path) for path in ("/workers", "/settings", "/audit")]
    texts.append(get(site, "/audit", actor=XSS, target=XSS, action=XSS))
    texts.append(post(site, "/do/keys/create", 201, name=XSS, role="viewer").text)
    texts.append(post(site, "/do/keys/create", 422, name=XSS, role=XSS, tenant=XSS).text)
    fields = {"name": "max_waiting", "value": XSS}
    texts.append(site.http.post("/do/settings", data=fields, headers=HTMX).text)

    for text in texts:
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text
