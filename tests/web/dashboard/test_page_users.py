"""The pages about users over HTTP: who sees what, what is escaped, what each action does."""

import html
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from helpers.browser import Site, Web
from helpers.pages import get, send, toast
from helpers.tasks import beat, claim_one, fill, push
from helpers.world import World
from starlette.applications import Starlette
from starlette.routing import Mount

from fairqueue import TaskQueue, TaskScheduler
from fairqueue.demo.seeder import seed
from fairqueue.inspection import Inspector
from fairqueue.models import UserSettings
from fairqueue.stats.users import UserInfo
from fairqueue.web.dashboard.formatting import dotted
from fairqueue.web.dashboard.pages.user_helpers import evenness, hint, scale_of, tones_of

ODD = [
    "a/b?c#d%41&e=f+g",
    '<script>alert("x")</script>',
    "../etc",
    "two  words ",
    "Ünal ☃",
    "{{7*7}}",
]


def serve(world: World, count: int = 100) -> None:
    world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=count))


# --- the list -------------------------------------------------------------------------------------


def test_an_empty_queue_says_what_users_are(site: Site) -> None:
    text = get(site, "/users")
    assert "There are no users yet" in text
    assert "fairqueue tasks push --user alice" in text


def test_users_are_listed_with_their_numbers_the_busiest_first(world: World, site: Site) -> None:
    world.queue.set_user("alice", weight=3, max_running=1)
    world.fill("alice", 4)
    world.fill("bob", 9)
    serve(world, 2)
    world.advance(90)
    world.claim_one()
    text = get(site, "/users")
    assert text.index(">bob</a>") < text.index(">alice</a>")
    assert "1 min 30 s" in text
    assert "75.0 %" in text  # what alice is entitled to
    assert "fairqueue users list --minutes 60" in text


def test_where_nobody_is_busy_all_users_are_listed_by_name(queue: TaskQueue, site: Site) -> None:
    for number in range(30):
        queue.set_user(f"user-{number:02d}", weight=2)
    text = get(site, "/users")
    assert "No tasks are waiting or running" in text
    assert ">user-00</a>" in text
    assert ">user-25</a>" not in text
    assert "order=name" in text.split('rel="next"')[1][:200]


def test_pages_follow_each_other(queue: TaskQueue, site: Site) -> None:
    for number in range(30):
        fill(queue, f"user-{number:02d}", 1)
    for order in ("", "name"):
        first = site.http.get("/users", params={"order": order}).text
        path = html.unescape(first.split('rel="next" href="')[1].split('"')[0])
        second = get(site, "/users" + path)
        names = [f">user-{number:02d}</a>" for number in range(30)]
        assert [name in first for name in names] == [True] * 25 + [False] * 5
        assert [name in second for name in names] == [False] * 25 + [True] * 5
        assert 'rel="next"' not in second


def test_users_are_found_by_prefix_and_tenant(queue: TaskQueue, site: Site) -> None:
    push(queue, "a", user_id="anna", tenant="acme")
    push(queue, "b", user_id="anton")
    push(queue, "c", user_id="bob", tenant="acme")
    text = get(site, "/users", prefix="an", tenant="acme", order="name")
    assert [f">{user}</a>" in text for user in ("anna", "anton", "bob")] == [True, False, False]
    assert "No user matches" in get(site, "/users", prefix="x")


@pytest.mark.parametrize("query", ["order=size", "cursor=x", "tenant=a%20b", "prefix=" + "x" * 201])
def test_a_query_that_cannot_be_is_refused_with_a_message(site: Site, query: str) -> None:
    answer = site.http.get(f"/users?{query}", headers={"Accept": "text/html"})
    assert answer.status_code == 422
    assert "Go back" in answer.text


@pytest.mark.parametrize(
    ("window", "minutes"), [("15m", 15), ("1h", 60), ("24h", 1440), ("no", 60)]
)
def test_the_window_is_in_the_address(world: World, site: Site, window: str, minutes: int) -> None:
    world.fill("alice", 1)
    assert f"--minutes {minutes}" in get(site, "/users", window=window)
    assert get(site, "/users/alice", window=window)


def test_the_jain_index_is_told_and_explained(queue: TaskQueue, site: Site) -> None:
    fill(queue, "alice", 1)
    text = get(site, "/users")
    assert "Jain’s index" in text
    assert [evenness(jain)[0] for jain in (None, 1.0, 0.9, 0.5)] == [
        "nothing to compare",
        "even",
        "roughly even",
        "uneven",
    ]


def test_a_month_of_use_is_shown(queue: TaskQueue, site: Site) -> None:
    seeded = seed(queue)
    text = get(site, "/users", window="24h", order="name")
    assert [user for user in seeded.users if f">{dotted(user)}</a>" not in text] == []
    people = Inspector(queue).users.list(order="name", limit=100)
    for user in seeded.users:
        known = [info for info in people if info.user_id == user]
        for info in known:
            own = {} if info.tenant is None else {"tenant": info.tenant}
            assert get(site, f"/users/{user}", window="24h", **own)
        assert known


# --- hints ----------------------------------------------------------------------------------------


def make_info(world: World, **changes: Any) -> UserInfo:
    world.fill("alice", 1)
    info = Inspector(world.queue).users.get("alice")
    fields = {name: getattr(info, name) for name in UserInfo.__dataclass_fields__}
    return UserInfo(**{**fields, "oldest_wait": 3600.0, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"oldest_wait": 5.0}, "came late: the oldest has waited 5 s"), ({}, "CRITICAL")],
)
def test_an_underserved_user_sees_why(world: World, changes: dict[str, Any], reason: str) -> None:
    found = hint(make_info(world, entitled=0.5, received=0.1, **changes), 60)
    assert found is not None
    assert found.kind == "under"
    assert reason in found.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": UserSettings(paused=True)}, "it is paused"),
        ({"settings": UserSettings(max_running=2), "running": 1}, "at most 2 of its tasks may run"),
        (
            {"settings": UserSettings(rate=0.5), "ended": 1700},
            "limited to 0.5 tasks per second",
        ),
        ({"held": 1}, "limits of their names or keys"),
    ],
)
def test_a_user_whom_somebody_has_limited_is_not_called_under_served(
    world: World, changes: dict[str, Any], reason: str
) -> None:
    # Also between two tasks that its rate lets through, when nothing holds it back.
    for state in ("waiting", "served"):
        info = make_info(world, entitled=0.5, received=0.1, state=state, **changes)
        found = hint(info, 60)
        assert found is not None
        assert (found.kind, found.label) == ("limited", "Limited")
        assert reason in found.reason


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("paused", "its tenant is paused"),
        ("capped", "its tenant has reached a limit"),
        ("rate limited", "its tenant has reached a limit"),
    ],
)
def test_a_user_whose_tenant_is_limited_is_not_called_under_served(
    world: World, state: str, reason: str
) -> None:
    found = hint(make_info(world, entitled=0.5, received=0.1, state=state), 60)
    assert found is not None
    assert (found.kind, found.reason) == ("limited", reason)


@pytest.mark.parametrize(
    ("settings", "state"),
    [(UserSettings(max_running=2), "capped"), (UserSettings(rate=0.5), "rate limited")],
)
def test_a_distant_limit_is_not_a_reason(world: World, settings: UserSettings, state: str) -> None:
    info = make_info(world, entitled=0.5, received=0.1, settings=settings)
    found = [hint(replace(info, state=each), 60) for each in ("waiting", state)]
    assert [each and each.kind for each in found] == ["under", "limited"]


def test_colours_of_a_chart_go_by_user() -> None:
    users = [f"user-{n}" for n in range(8)]
    tones = dict(zip(users, tones_of(users), strict=True))
    assert len(set(tones.values())) == 8
    assert dict(zip(users[::-1], tones_of(users[::-1]), strict=True)) == tones
    alone = {user: tones_of([user])[0] for user in users}
    kept = [user for user in users if alone[user] == tones[user]]
    assert len(kept) >= 4  # whose colour no other wants has it whoever else is there
    for user in kept:
        fewer = [each for each in users if each == user or each > user]
        assert tones_of(fewer)[fewer.index(user)] == tones[user]


@pytest.mark.one_partition
def test_more_users_than_are_counted_are_told_as_more(
    queue: TaskQueue, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairqueue.stats.users.MAX_SUMMED", 3)
    for n in range(3):
        fill(queue, f"user-{n}", 1)
    assert "<dd>3 users</dd>" in get(site, "/users")
    fill(queue, "user-3", 1)
    monkeypatch.setattr("fairqueue.stats.users.DEMAND_MS", 0)
    assert "<dd>more than 3 users</dd>" in get(site, "/users")


def test_only_what_is_far_from_its_share_is_told(world: World) -> None:
    def kind(**changes: Any) -> str | None:
        found = hint(make_info(world, **changes), 60)
        return None if found is None else found.kind

    assert kind(entitled=0.5, received=0.45) is None
    assert kind(entitled=0.5, received=0.0, backlog=0) is None
    assert kind(entitled=0.005, received=0.0) is None
    assert kind(entitled=0.3, received=0.9) == "over"
    assert kind(entitled=0.01, received=0.05) is None


def test_an_under_served_user_stands_out_in_the_list(world: World, site: Site) -> None:
    world.fill("bob", 10)
    serve(world)
    world.fill("alice", 1)
    text = get(site, "/users")
    assert 'class="is-under"' in text
    assert "Under-served" in text
    world.queue.set_user("alice", paused=True)
    text = get(site, "/users")
    assert 'class="is-limited"' in text
    assert "it is paused" in text
    assert "Under-served" not in text


def test_bars_are_full_at_a_round_share(world: World) -> None:
    assert [
        scale_of([make_info(world, entitled=entitled, received=0.0)])
        for entitled in (0.0, 0.04, 0.2, 0.26, 0.9)
    ] == [0.05, 0.05, 0.25, 0.5, 1.0]
    assert scale_of([]) == 0.05


# --- one user -------------------------------------------------------------------------------------


def test_a_user_has_a_page_with_all_that_belongs_to_it(world: World, site: Site) -> None:
    scheduler = TaskScheduler(world.queue)
    for number in range(26):
        scheduler.add_schedule("0 9 * * *", "alice", schedule_id=f"nightly-{number:02d}")
    world.push("done")
    serve(world)
    world.push("first", "second")
    world.fill("bob", 1)
    text = get(site, "/users/alice")
    wait = "2 tasks are waiting for a worker"
    for part in ("Why is alice waiting?", "nightly-00", "done", "first", wait):
        assert part in text
    assert "nightly-25" not in text
    assert 'href="/schedules?user_id=alice"' in text
    for line in ("weight alice 2", "pause alice", "purge --dry-run alice", "show alice"):
        assert f"fairqueue users {line}" in text


@pytest.mark.parametrize(("count", "noun"), [(1, "task"), (2, "tasks")])
def test_a_backlog_is_counted_in_the_right_number(
    queue: TaskQueue, site: Site, count: int, noun: str
) -> None:
    fill(queue, "alice", count)
    text = get(site, "/users/alice")
    assert f"<dt>Backlog</dt>\n  <dd><b>{count}</b><small>waiting {noun}</small>" in text


def why(site: Site) -> str:
    text = get(site, "/users/alice")
    part = text.split('class="headline"')[1].split("</p>")[0]
    return " ".join(part.split("<strong>")[1].split("</strong>")[0].split())


def pausing(queue: TaskQueue) -> None:
    queue.pause_user("alice", by="<ann>", note="<b>unpaid</b>")
    fill(queue, "alice", 2)


def capping(queue: TaskQueue) -> None:
    queue.set_user("alice", max_running=1)
    fill(queue, "alice", 2)
    claim_one(queue)


def rating(queue: TaskQueue) -> None:
    queue.set_user("alice", rate=0.01)
    fill(queue, "alice", 2)
    claim_one(queue)


def holding(queue: TaskQueue) -> None:
    queue.set_limits("default", slots=1)
    fill(queue, "alice", 2)
    queue.claim("w", limit=2)


def queueing(queue: TaskQueue) -> None:
    fill(queue, "aaron", 1)
    fill(queue, "alice", 1)


@pytest.mark.parametrize(
    ("arrange", "sentence"),
    [
        (lambda queue: queue.set_user("alice", weight=2), "Nothing is waiting or running"),
        (pausing, "User 'alice' is paused by &lt;ann&gt; since <time"),
        (capping, "User 'alice' has 1 task running, as many as max_running allows."),
        (rating, "User 'alice' has reached the rate limit of 0.01 tasks per second. The next"),
        (holding, "The only slot for tasks named 'default' is taken."),
        (queueing, "It waits for its turn, after 1 other user."),
        (lambda queue: fill(queue, "alice", 1), "It is next: the first worker with a free slot"),
        (lambda queue: push(queue, "later", delay=60), "Starts at <time"),
    ],
)
def test_a_user_page_answers_why_it_waits(
    queue: TaskQueue, site: Site, arrange: Callable[[TaskQueue], object], sentence: str
) -> None:
    beat(queue)
    arrange(queue)
    assert sentence in why(site)
    assert "<b>unpaid" not in get(site, "/users/alice")


def test_pages_that_say_why_also_say_that_no_worker_is_alive(queue: TaskQueue, site: Site) -> None:
    push(queue, "first")
    assert "No worker is alive" in why(site)
    assert "No worker is alive" in get(site, "/runs/first")
    assert "no worker is alive" in get(site, "/users")


def test_a_user_is_paused_for_a_time_and_with_a_reason(world: World, site: Site) -> None:
    world.fill("alice", 1)
    dialog = get(site, "/ask/users/pause", id="alice")
    assert "Pause alice?" in dialog
    done = send(site, "/do/users/pause", id="alice", note="unpaid", minutes="60")
    assert done.status_code == 204
    settings = world.queue.get_user("alice")
    assert (settings.pause_note, settings.paused_by) == ("unpaid", "local")
    assert settings.paused_until == world.now() + timedelta(hours=1)
    assert "unpaid" in get(site, "/users/alice")
    assert send(site, "/do/users/pause", id="alice", minutes="-5").status_code == 422


def test_the_next_task_is_explained(queue: TaskQueue, site: Site) -> None:
    push(queue, "late")
    push(queue, "urgent", priority=6)
    text = get(site, "/users/alice")
    assert 'href="/runs/urgent"' in text.split("This is about the next task")[1][:100]


@pytest.mark.parametrize("path", ["/users/nobody", "/users/" + "x" * 300, "/users/a%00b"])
def test_an_unknown_user_gets_a_kind_page(site: Site, path: str) -> None:
    answer = site.http.get(path)
    assert answer.status_code == 404
    assert "exists from the first task or schedule" in answer.text


@pytest.mark.parametrize("user", ODD)
def test_any_names_are_escaped_and_linked(queue: TaskQueue, site: Site, user: str) -> None:
    fill(queue, user, 1)
    queue.set_user(user, weight=2)
    text = get(site, "/users")
    assert "<script>alert" not in text
    path = html.unescape(text.split('<td class="who"><a href="')[1].split('"')[0])
    assert path.startswith("/users/")
    own = get(site, path)
    assert f"<h1>{_escaped(user)}</h1>" in own
    assert "<script>alert" not in own
    dialog = html.unescape(text.split('hx-get="/ask/users/limits?')[1].split('"')[0])
    assert _escaped(user) in get(site, f"/ask/users/limits?{dialog}")
    assert send(site, "/do/users/pause", id=user).status_code == 204
    assert queue.get_user(user).paused


def _escaped(text: str) -> str:
    return html.escape(text).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")


# --- charts ---------------------------------------------------------------------------------------


def test_the_chart_has_the_shares_of_the_users_who_got_most(world: World, site: Site) -> None:
    for number in range(10):
        world.fill(f"user-{number}", 1 + (number < 8))
    serve(world)
    document = site.http.get("/charts/users/shares").json()
    assert [line["label"] for line in document["lines"]] == [
        *(f"user-{number}" for number in range(8)),
        "others",
    ]
    assert document["unit"] == "%"
    assert len(document["times"]) == 30
    ended = [[value for value in line["values"] if value] for line in document["lines"]]
    assert ended == [[pytest.approx(100 / 9)]] * 9
    assert all(line["values"].count(None) == 29 for line in document["lines"])
    counts = site.http.get("/charts/users/shares?as=runs").json()
    assert [sum(line["values"]) for line in counts["lines"]] == [2] * 9


def test_a_user_has_a_chart_of_its_runs(world: World, site: Site) -> None:
    world.fill("alice", 3)
    world.fill("bob", 1)
    serve(world)
    document = site.http.get("/charts/users/service?id=alice&window=15m").json()
    assert [sum(line["values"]) for line in document["lines"]] == [3]
    assert site.http.get("/charts/users/service?id=carol").json()["lines"] == []


# --- actions --------------------------------------------------------------------------------------


def test_a_user_is_paused_and_resumed(queue: TaskQueue, site: Site) -> None:
    fill(queue, "alice", 1)
    assert "Resume alice" not in get(site, "/users")
    assert send(site, "/do/users/pause", id="alice").status_code == 204
    assert queue.get_user("alice").paused
    assert "Resume alice" in get(site, "/users")
    send(site, "/do/users/resume", id="alice")
    assert not queue.get_user("alice").paused


def form_of(world: World, site: Site, user: str = "alice") -> dict[str, str]:
    """The fields of the form as the page has them."""
    text = get(site, f"/users/{user}").split('<form class="limits"')[1].split("</form>")[0]
    found = {}
    for part in text.split("<input ")[1:]:
        value = part.split('value="')[1].split('"')[0]
        found[part.split('name="')[1].split('"')[0]] = html.unescape(value)
    return found


def test_limits_are_changed_and_taken_away(world: World, site: Site) -> None:
    world.queue.set_user("alice", max_waiting=50)
    form = form_of(world, site)
    assert (form["weight"], form["max_waiting"], form["max_running"]) == ("1", "50", "")
    form |= {
        "weight": "2.5",
        "max_running": "4",
        "rate": "0.5",
        "max_waiting": "",
    }
    answer = send(site, "/do/users/set", **form)
    assert answer.status_code == 204, answer.text
    settings = world.queue.get_user("alice")
    assert (settings.weight, settings.max_running, settings.rate) == (2.5, 4, 0.5)
    assert settings.max_waiting is None


def test_only_what_was_changed_is_sent_on(world: World, site: Site) -> None:
    world.queue.set_user("alice", weight=2)
    form = form_of(world, site)
    world.queue.set_user("alice", max_running=7)  # by somebody else, meanwhile
    send(site, "/do/users/set", **{**form, "weight": "3"})
    settings = world.queue.get_user("alice")
    assert (settings.weight, settings.max_running) == (3, 7)
    (entry,) = Inspector(world.queue).audit.list(action="user.set")
    assert entry.details == {"weight": 3}
    assert toast(send(site, "/do/users/set", **form)) == "Nothing was changed."


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weight", "0", "weight must be a number from 0.01 to 1000, not 0.0"),
        ("weight", "much", "weight must be a number, not 'much'"),
        ("weight", "", "weight is required"),
        ("weight", "nan", "weight"),
        ("max_running", "0", "max_running must be a whole number from 1"),
        ("max_running", "1.5", "max_running must be a whole number, not '1.5'"),
        ("max_waiting", "-3", "max_waiting must be a whole number from 1"),
        ("rate", "fast", "rate must be a number, not 'fast'"),
    ],
)
def test_bad_input_is_refused_with_the_message_of_the_library(
    world: World, site: Site, field: str, value: str, message: str
) -> None:
    world.queue.set_user("alice", weight=2)
    before = world.queue.get_user("alice")
    answer = send(site, "/do/users/set", **{**form_of(world, site), field: value})
    assert answer.status_code == 422
    assert message in toast(answer)
    assert world.queue.get_user("alice") == before


def test_a_backlog_is_counted_before_it_is_dropped(world: World, site: Site) -> None:
    world.fill("alice", 4)
    serve(world, 1)  # so that something is known of alice afterwards
    world.fill("bob", 1)
    dialog = get(site, "/ask/users/purge", id="alice")
    assert "Cancel 3 waiting tasks?" in dialog
    assert "fairqueue users purge --dry-run alice" in dialog
    assert world.queue.size("alice") == 3
    assert send(site, "/do/users/purge", id="alice").status_code == 204
    assert (world.queue.size("alice"), world.queue.size("bob")) == (0, 1)
    assert "Nothing to cancel" in get(site, "/ask/users/purge", id="alice")


def test_a_dialog_that_is_none_is_not_found(queue: TaskQueue, site: Site) -> None:
    fill(queue, "alice", 1)
    assert site.http.get("/ask/users/other?id=alice").status_code == 404
    assert site.http.get("/ask/users/purge?id=nobody").status_code == 404


def test_every_action_is_in_the_audit_log(queue: TaskQueue, site: Site) -> None:
    fill(queue, "alice", 2)
    for name in ("pause", "resume", "purge"):
        send(site, f"/do/users/{name}", id="alice")
    send(site, "/do/users/set", id="alice", weight="2", was_weight="1")
    entries = Inspector(queue).audit.list(target="alice")
    assert [(entry.action, entry.outcome, entry.via) for entry in entries] == [
        (f"user.{name}", "done", "web") for name in ("set", "purge", "resume", "pause")
    ]


def test_an_action_works_without_scripts(queue: TaskQueue, site: Site) -> None:
    fill(queue, "alice", 1)
    answer = site.http.post(
        "/do/users/pause", data={"id": "alice"}, headers={"Referer": f"{site.url}/users/alice"}
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/users/alice")


# --- roles and tenants ----------------------------------------------------------------------------


def as_key(site: Site, role: str, tenant: str | None = None) -> dict[str, str]:
    return {"Authorization": f"Bearer {site.key(role=role, tenant=tenant)}", "HX-Request": "true"}


ACTIONS = ("pause", "resume", "set", "purge")


@pytest.mark.parametrize(
    ("role", "shown", "allowed"),
    [
        ("viewer", (), ()),
        ("operator", ("Pause",), ("pause", "resume")),
        ("admin", ("Pause", "Cancel waiting tasks", "Change limits"), ACTIONS),
    ],
)
def test_a_role_sees_the_buttons_that_it_may_use(
    queue: TaskQueue, web: Web, role: str, shown: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    site = web(auth=True)
    fill(queue, "alice", 1)
    headers = as_key(site, role)
    page = site.http.get("/users/alice", headers=headers).text
    listed = site.http.get("/users", headers=headers).text
    buttons = [text for text in ("Pause", "Cancel waiting tasks", "Change limits") if text in page]
    assert tuple(buttons) == shown
    assert ("Pause alice" in listed) == ("Pause" in shown)
    assert ("Change the limits of alice" in listed) == ("Change limits" in shown)
    answers = {
        name: site.http.post(
            f"/do/users/{name}",
            data={"id": "alice", "weight": "2", "was_weight": "1"},
            headers=headers,
        ).status_code
        for name in ACTIONS
    }
    assert answers == {name: 204 if name in allowed else 403 for name in ACTIONS}


def test_a_read_only_site_shows_no_buttons_and_changes_nothing(queue: TaskQueue, web: Web) -> None:
    site = web(read_only=True)
    fill(queue, "alice", 1)
    assert "Pause" not in get(site, "/users/alice")
    assert "Pause alice" not in get(site, "/users")
    assert send(site, "/do/users/pause", id="alice").status_code == 403
    assert not queue.get_user("alice").paused


def test_a_viewer_of_a_tenant_sees_only_its_own_users(world: World, web: Web) -> None:
    site = web(auth=True)
    world.push("a", user_id="anna", tenant="acme")
    world.push("b", user_id="bob", tenant="other")
    world.push("c", user_id="carol")
    serve(world)
    for order in ("backlog", "name"):
        headers = as_key(site, "admin", "acme")
        text = site.http.get(f"/users?order={order}", headers=headers).text
        assert "bob" not in text
        assert "carol" not in text
        assert "<dd>1 user</dd>" in text  # whom Jain's index compares: its own users
    assert "anna" in text
    lines = site.http.get("/charts/users/shares?as=runs", headers=headers).json()["lines"]
    assert [(line["label"], sum(line["values"])) for line in lines] == [("anna", 1)]
    for path in ("/users/bob", "/ask/users/purge?id=bob", "/charts/users/service?id=carol"):
        assert site.http.get(path, headers=headers).status_code == 404
    for path in ("/ask/users/purge?id=bob", "/charts/users/service?id=bob"):
        assert site.http.get(f"{path}&tenant=other", headers=headers).status_code == 403
    for name in ACTIONS:
        data = {"id": "bob", "weight": "2", "was_weight": "1"}
        answer = site.http.post(f"/do/users/{name}", data=data, headers=headers)
        assert answer.status_code == (403 if name == "set" else 404)
    own = site.http.get("/users/anna", headers=headers).text
    assert "Change limits" not in own  # these are what keeps tenants from each other's share
    assert "Cancel waiting tasks" in own


def test_links_are_right_where_the_app_is_mounted(queue: TaskQueue, web: Web) -> None:
    site = web(mounted=lambda app: Starlette(routes=[Mount("/ops", app)]), prefix="/ops")
    fill(queue, "a b", 1)
    text = get(site, "users")
    assert 'href="/ops/users/a%20b"' in text
    assert 'hx-get="/ops/ask/users/purge?id=a%20b"' in text
    assert get(site, "users/a%20b")
