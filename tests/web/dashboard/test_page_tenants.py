"""The pages about tenants over HTTP: shares on both levels, limits, and who may see and do what."""

import html
import re
from typing import Any

import pytest
from helpers.browser import Site, Web
from helpers.pages import get, send, toast
from helpers.tasks import beat, make_task
from helpers.world import World

from fairqueue import TaskQueue
from fairqueue.inspection import Inspector


def share_out(world: World) -> None:
    """Nine runs of acme, ann's and bob's, three of globex, and tasks that wait."""
    fill(world, "ann", 6, tenant="acme")
    fill(world, "bob", 3, tenant="acme")
    fill(world, "ann", 3, tenant="globex")
    serve(world)
    world.advance(90)
    fill(world, "ann", 2, tenant="acme")
    fill(world, "carl", 1)


def fill(world: World, user_id: str, count: int, **fields: Any) -> None:
    """Push tasks of a user. Their ids say nothing."""
    world.queue.push_many(make_task(user_id, **fields) for _ in range(count))


def serve(world: World) -> None:
    world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=100))


def row_of(text: str, tenant: str) -> str:
    """The row of a tenant in the list."""
    return text.split(f'<tr data-key="id={tenant}"')[1].split("</tr>")[0]


# --- the list -------------------------------------------------------------------------------------


def test_the_pages_of_tenants_are_offered_once_there_are_tenants(
    world: World, web: Web, queue: TaskQueue
) -> None:
    fill(world, "carl", 1)
    assert 'href="/tenants"' not in get(web(), "/users")
    fill(world, "ann", 1, tenant="acme")
    assert 'href="/tenants"' in get(web(), "/users")


def test_an_empty_list_says_what_tenants_are(site: Site) -> None:
    assert "fairqueue tasks push --user alice --tenant acme" in get(site, "/tenants")


def test_tenants_are_listed_with_entitled_and_received_share(world: World, site: Site) -> None:
    world.queue.set_tenant("globex", weight=2, max_waiting=50)
    share_out(world)
    text = get(site, "/tenants")
    assert text.index('<tr data-key="id=acme"') < text.index('<tr data-key="id=globex"')
    acme, globex = row_of(text, "acme"), row_of(text, "globex")
    assert ("<b>75.0 %</b>" in acme, "<b>25.0 %</b>" in globex) == (True, True)
    assert ">2 users</small>" in acme
    assert 'data-label="Backlog">2</td>' in acme
    assert 'data-label="Weight">2</td>' in globex
    assert "Jain’s index" in text
    assert "fairqueue tenants list --minutes 60" in text


def test_each_tenant_shows_how_even_its_users_are(world: World, site: Site) -> None:
    share_out(world)
    info = Inspector(world.queue).tenants.get("acme")
    assert info.jain is not None
    assert f"{info.jain:.3f}" in row_of(get(site, "/tenants"), "acme")


def test_pages_of_tenants_follow_each_other_and_are_found_by_prefix(
    queue: TaskQueue, site: Site
) -> None:
    for number in range(30):
        queue.set_tenant(f"tenant-{number:02d}", weight=2)
    first = get(site, "/tenants")
    path = html.unescape(first.split('rel="next" href="')[1].split('"')[0])
    second = get(site, "/tenants" + path)
    rows = [f'data-key="id=tenant-{number:02d}"' for number in range(30)]
    assert [row in first for row in rows] == [True] * 25 + [False] * 5
    assert [row in second for row in rows] == [False] * 25 + [True] * 5
    found = get(site, "/tenants", prefix="tenant-1")
    assert [row in found for row in rows] == [False] * 10 + [True] * 10 + [False] * 10
    assert "No tenant matches" in get(site, "/tenants", prefix="x")


def test_a_chart_has_the_shares_of_tenants_and_of_users_without_one(
    world: World, site: Site
) -> None:
    share_out(world)
    serve(world)
    lines = site.http.get("/charts/users/shares?as=runs").json()["lines"]
    assert {line["label"]: sum(line["values"]) for line in lines} == {
        "acme": 11,
        "globex": 3,
        "carl": 1,
    }


# --- one tenant -----------------------------------------------------------------------------------


def test_a_tenant_has_a_page_with_its_users_and_no_others(world: World, site: Site) -> None:
    share_out(world)
    text = get(site, "/tenants/acme")
    for part in ("Is acme waiting?", "Between the users of acme", "75.0 %", "of this tenant"):
        assert part in text
    assert 'href="/users/ann?tenant=acme"' in text
    assert "tenant=globex" not in text
    assert "carl" not in text
    for line in ("show acme", "pause acme", "weight acme 2", "purge --dry-run acme"):
        assert f"fairqueue tenants {line}" in text


def test_a_quiet_tenant_lists_all_its_users(world: World, site: Site) -> None:
    share_out(world)
    text = get(site, "/tenants/globex")
    assert "These are all users" in text
    assert 'href="/users/ann?tenant=globex"' in text


def test_a_tenant_has_a_chart_of_its_users(world: World, site: Site) -> None:
    share_out(world)
    lines = site.http.get("/charts/tenants/service?id=acme&as=runs").json()["lines"]
    assert {line["label"]: sum(line["values"]) for line in lines} == {"ann": 6, "bob": 3}


@pytest.mark.parametrize("path", ["/tenants/nobody", "/tenants/" + "x" * 300, "/tenants/a%00b"])
def test_an_unknown_tenant_gets_a_kind_page(site: Site, path: str) -> None:
    answer = site.http.get(path)
    assert answer.status_code == 404
    assert "exists from its first task" in answer.text


# --- pairs of tenant and user ---------------------------------------------------------------------


def test_users_of_one_id_have_a_page_each(world: World, site: Site) -> None:
    world.push("a", user_id="ann", tenant="acme")
    world.push("g", "h", user_id="ann", tenant="globex")
    world.push("plain", user_id="ann")
    for tenant, own in (("acme", {"a"}), ("globex", {"g", "h"}), ("", {"plain"})):
        text = get(site, "/users/ann", tenant=tenant)
        tasks = text.split('id="waiting-tasks"')[1].split("</section>")[0]
        assert {
            task
            for task in ("a", "g", "h", "plain")
            if re.search(rf'href="/runs/{task}["?]', tasks)
        } == own
    assert 'href="/users/ann?tenant=acme">ann of acme</a>' in get(site, "/users/ann")
    answer = site.http.get("/users/ann?tenant=other")
    assert answer.status_code == 404
    assert "ann of globex" in answer.text


def test_a_user_is_listed_and_changed_as_a_pair(world: World, site: Site) -> None:
    fill(world, "ann", 1, tenant="acme")
    fill(world, "ann", 1)
    text = get(site, "/users")
    assert ('data-key="id=ann"' in text, 'data-key="id=ann&amp;tenant=acme"' in text) == (
        True,
        True,
    )
    send(site, "/do/users/pause", id="ann", tenant="acme")
    assert world.queue.get_user("ann", tenant="acme").paused
    assert not world.queue.get_user("ann").paused
    assert "Resume ann of acme" in get(site, "/users")
    send(site, "/do/users/purge", id="ann", tenant="acme")
    assert world.queue.size("ann") == 1


@pytest.mark.one_partition
def test_a_user_is_moved_and_the_page_follows(world: World, site: Site) -> None:
    fill(world, "ann", 2, tenant="acme")
    dialog = get(site, "/ask/users/move", id="ann", tenant="acme")
    assert "Move ann of acme" in dialog
    answer = send(site, "/do/users/move", id="ann", tenant="acme", to="globex")
    assert answer.headers["HX-Redirect"] == "/users/ann?tenant=globex"
    assert Inspector(world.queue).users.get("ann", tenant="globex").backlog == 2
    assert not Inspector(world.queue).users.exists("ann", tenant="initech")
    answer = send(site, "/do/users/move", id="ann", tenant="globex", to="")
    assert answer.headers["HX-Redirect"] == "/users/ann"
    assert Inspector(world.queue).users.get("ann").backlog == 2
    refused = send(site, "/do/users/move", id="ann", to="a b")
    assert refused.status_code == 422
    assert "tenant must be 1 to 64 letters" in toast(refused)


def test_a_waiting_task_is_explained_on_both_levels(world: World, site: Site) -> None:
    beat(world.queue)
    fill(world, "zoe", 1, tenant="aardvark")
    fill(world, "ann", 1, tenant="acme")
    world.push("late", user_id="bob", tenant="acme")
    told = "is served after 1 other; among its 2 waiting users, 'bob' is 2nd."
    assert told in " ".join(get(site, "/users/bob", tenant="acme").split())
    assert told in " ".join(get(site, "/runs/late").split())


# --- actions --------------------------------------------------------------------------------------


def form_of(site: Site, tenant: str) -> dict[str, str]:
    """The fields of the form of limits as the page has them."""
    text = get(site, f"/tenants/{tenant}").split('<form class="limits"')[1].split("</form>")[0]
    found = {}
    for part in text.split("<input ")[1:]:
        value = part.split('value="')[1].split('"')[0]
        found[part.split('name="')[1].split('"')[0]] = html.unescape(value)
    return found


def test_limits_of_a_tenant_are_changed_and_taken_away(world: World, site: Site) -> None:
    world.queue.set_tenant("acme", max_waiting=50)
    form = form_of(site, "acme")
    assert (form["id"], form["weight"], form["max_waiting"]) == ("acme", "1", "50")
    form |= {"weight": "2.5", "max_running": "4", "rate": "0.5", "max_waiting": ""}
    answer = send(site, "/do/tenants/set", **form)
    assert answer.status_code == 204, answer.text
    settings = world.queue.get_tenant("acme")
    assert (settings.weight, settings.max_running, settings.rate) == (2.5, 4, 0.5)
    assert settings.max_waiting is None
    (entry,) = Inspector(world.queue).audit.list(action="tenant.set")
    assert entry.target == "acme"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weight", "0", "weight must be a number from 0.01 to 1000, not 0.0"),
        ("weight", "", "weight is required"),
        ("max_running", "0", "max_running must be a whole number from 1"),
        ("rate", "nan", "rate"),
        ("id", "a b", "tenant must be 1 to 64 letters"),
    ],
)
def test_bad_limits_of_a_tenant_are_refused(
    world: World, site: Site, field: str, value: str, message: str
) -> None:
    world.queue.set_tenant("acme", weight=2)
    form = form_of(site, "acme") | {"max_waiting": "9", field: value}
    answer = send(site, "/do/tenants/set", **form)
    assert answer.status_code == 422
    assert message in toast(answer)
    assert world.queue.get_tenant("acme").max_waiting is None


def test_a_tenant_is_paused_resumed_and_purged_after_being_asked(world: World, site: Site) -> None:
    fill(world, "ann", 2, tenant="acme")
    fill(world, "bob", 1, tenant="acme")
    fill(world, "ann", 1, tenant="globex")
    assert "Pause acme?" in get(site, "/ask/tenants/pause", id="acme")
    send(site, "/do/tenants/pause", id="acme", note="unpaid", minutes="60")
    assert world.queue.get_tenant("acme").pause_note == "unpaid"
    paused = get(site, "/tenants/acme")
    assert "unpaid" in paused
    assert "no task of its users starts" in paused
    assert "Resume acme" in get(site, "/tenants")
    send(site, "/do/tenants/resume", id="acme")
    assert not world.queue.get_tenant("acme").paused
    assert "Cancel 3 waiting tasks?" in get(site, "/ask/tenants/purge", id="acme")
    assert send(site, "/do/tenants/purge", id="acme").status_code == 204
    assert world.queue.inspect().ready == 1
    assert "Nothing to cancel" in get(site, "/ask/tenants/purge", id="acme")


# --- who may do what ------------------------------------------------------------------------------

ACTIONS = ("set", "pause", "resume", "purge")


def as_key(site: Site, role: str, tenant: str | None = None) -> dict[str, str]:
    return {"Authorization": f"Bearer {site.key(role, role, tenant)}", "HX-Request": "true"}


@pytest.mark.parametrize(
    ("role", "shown", "allowed"),
    [
        ("viewer", (), ()),
        ("operator", ("Pause…",), ("pause", "resume")),
        ("admin", ("Pause…", "Cancel waiting tasks…", "Change limits"), ACTIONS),
    ],
)
def test_buttons_are_those_of_the_role(
    world: World, web: Web, role: str, shown: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    site = web(auth=True)
    fill(world, "ann", 1, tenant="acme")
    headers = as_key(site, role)
    text = site.http.get("/tenants/acme", headers=headers).text
    buttons = [
        each for each in ("Pause…", "Cancel waiting tasks…", "Change limits") if each in text
    ]
    assert tuple(buttons) == shown
    answers = {
        name: site.http.post(
            f"/do/tenants/{name}",
            data={"id": "acme", "weight": "2", "was_weight": "1"},
            headers=headers,
        ).status_code
        for name in ACTIONS
    }
    assert answers == {name: 204 if name in allowed else 403 for name in ACTIONS}


def test_a_key_of_a_tenant_sees_its_own_charts_and_nothing_of_others(
    world: World, web: Web
) -> None:
    site = web(auth=True)
    share_out(world)
    fill(world, "zoe", 1, tenant="globex")
    headers = as_key(site, "admin", "acme")
    assert site.http.get("/tenants", headers=headers).headers["location"] == "/tenants/acme"
    text = site.http.get("/tenants/acme", headers=headers).text
    assert 'href="/tenants/acme"' in text  # in the navigation
    assert 'href="/users/ann"' in text
    for other in ("globex", "carl", "zoe", "25.0 %", "75.0 %", "Change limits", "Pause…"):
        assert other not in text
    chart = site.http.get("/charts/tenants/service?id=acme&as=runs", headers=headers).json()
    assert {line["label"]: sum(line["values"]) for line in chart["lines"]} == {"ann": 6, "bob": 3}
    paths = ("/tenants/globex", "/ask/tenants/purge?id=globex", "/charts/tenants/service?id=globex")
    for path in paths:
        assert site.http.get(path, headers=headers).status_code == 404
    assert site.http.get("/users?tenant=globex", headers=headers).status_code in (403, 404)
    answers = {
        name: site.http.post(
            f"/do/tenants/{name}",
            data={"id": "acme", "weight": "2", "was_weight": "1"},
            headers=headers,
        ).status_code
        for name in ("set", "pause", "resume")
    }
    assert answers == {"set": 403, "pause": 403, "resume": 403}
    moved = site.http.post("/do/users/move", data={"id": "ann", "to": "globex"}, headers=headers)
    assert moved.status_code == 403
    purged = site.http.post("/do/tenants/purge", data={"id": "globex"}, headers=headers)
    assert purged.status_code == 404
    assert world.queue.size("zoe") == 1


def test_the_page_of_an_own_tenant_is_there_before_it_has_any_data(web: Web) -> None:
    site = web(auth=True)
    answer = site.http.get("/tenants/acme", headers=as_key(site, "viewer", "acme"))
    assert answer.status_code == 200
    assert "No task or schedule has named a user of this tenant yet" in answer.text


HOSTILE = ['<script>alert("x")</script>', "a/b?c#d%41&e=f", "{{7*7}}", "../etc"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_are_no_tenants_are_escaped(world: World, site: Site, name: str) -> None:
    fill(world, name, 1, tenant="acme")
    for path, query in (
        ("/tenants", {"prefix": "acme"}),
        ("/tenants/acme", {}),
        ("/users", {"tenant": "acme"}),
        ("/ask/users/move", {"id": name, "tenant": "acme"}),
    ):
        assert "<script>alert" not in get(site, path, **query)
    path = html.unescape(get(site, "/tenants/acme").split('<td class="who"><a href="')[1])
    assert site.http.get(path.split('"')[0]).status_code == 200
    for unknown in (f"/users/ann?tenant={name}", f"/tenants/{name}"):
        answer = site.http.get(unknown, headers={"Accept": "text/html"})
        assert "<script>alert" not in answer.text
        assert answer.status_code < 500


@pytest.mark.untidy
def test_a_damaged_name_of_a_tenant_does_not_hide_the_others(world: World, site: Site) -> None:
    fill(world, "ann", 1, tenant="acme")
    planted: Any = {"<script>alert(1)</script>\0eve": 0}
    world.redis.zadd(world.keys["tenant_users"], planted)
    text = get(site, "/tenants")
    assert '<tr data-key="id=acme"' in text
    assert "<script>alert" not in text


def test_a_read_only_site_changes_no_tenant(world: World, web: Web) -> None:
    site = web(read_only=True)
    fill(world, "ann", 1, tenant="acme")
    assert "Pause" not in get(site, "/tenants/acme")
    assert send(site, "/do/tenants/pause", id="acme").status_code == 403
    assert not world.queue.get_tenant("acme").paused


def test_tenants_are_found_by_the_search(world: World, site: Site) -> None:
    fill(world, "ann", 1, tenant="acme")
    text = get(site, "/search", q="ac")
    assert 'href="/tenants/acme"' in text
    assert 'href="/users/ann?tenant=acme"' in get(site, "/search", q="an")
