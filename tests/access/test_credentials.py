"""Who may come in: keys, one-time logins, sessions, and how often."""

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from helpers.network import LossyProxy
from helpers.state import dump
from helpers.tasks import make_task
from helpers.world import World

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import MAX_KEYS, AccessStore, Actor, Admission, KeyInfo, NewKey
from fairqueue.access.idempotency import ReplyStore
from fairqueue.clock import ManualClock
from fairqueue.errors import Forbidden, InvalidInput, QueueFull, RedisRefused
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer

HOUR = 3600.0
SECRET = re.compile(r"fq_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")
NO_PARENTS: list[Any] = [[], {}, None, True, 7, -1e300, "", "x", "\ud800"]
NO_ENDS: list[Any] = [[], None, "x", -1e300, 1]
GARBAGE = ['{"kind":"key"', "", "[]", "1", '"x"', "null", '{"kind":"key","hash":7}', "\udcff"]


@pytest.fixture
def store(queue: TaskQueue) -> AccessStore:
    return AccessStore(queue.link)


@pytest.fixture
def redis_of(world: World) -> Callable[..., Any]:
    """Send a command about one key of the queue."""

    def send(command: str, key: str, *arguments: Any) -> Any:
        return world.redis.execute_command(command, world.keys[key], *arguments)

    return send


def make_key(store: AccessStore, name: str = "ci", role: str = "operator", **fields: Any) -> NewKey:
    return store.create_key(name, role, **{"by": "root", **fields})


def admit(store: AccessStore, secret: str) -> Actor | None:
    """Who comes with a secret, when there is no hurry."""
    return store.admit(secret, rate=1000.0, burst=1000).actor


def altered(secret: str) -> str:
    """Another secret with the same id."""
    return secret[:-1] + ("A" if secret[-1] != "A" else "B")


# --- actors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("viewer", ["viewer"]),
        ("operator", ["viewer", "operator"]),
        ("admin", ["viewer", "operator", "admin"]),
    ],
)
def test_a_role_may_what_the_roles_before_it_may(role: str, allowed: list[str]) -> None:
    actor = Actor(name="a", role=role)
    assert [each for each in ("viewer", "operator", "admin") if actor.may(each)] == allowed


def test_an_actor_of_a_tenant_sees_that_tenant_only() -> None:
    everybody, mine = Actor(name="a"), Actor(name="a", tenant="acme")
    assert [everybody.sees(t) for t in ("acme", "other", None)] == [True, True, True]
    assert [mine.sees(t) for t in ("acme", "other", None)] == [True, False, False]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "name of an actor must be .*, not ''"),
        ({"name": "a\nb"}, "name of an actor"),
        ({"name": "a", "role": "root"}, "role must be one of viewer, operator, admin, not 'root'"),
        ({"name": "a", "role": None}, "role must .*not None"),
        ({"name": "a", "tenant": "two words"}, "tenant must .*not 'two words'"),
        ({"name": "a", "via": "fax"}, "via must .*not 'fax'"),
    ],
)
def test_an_actor_that_cannot_be_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        Actor(**fields)


def test_a_role_that_is_none_is_never_allowed() -> None:
    with pytest.raises(InvalidInput, match=r"role must .*not 'owner'"):
        Actor(name="a").may("owner")


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_lets_in_whom_it_was_made_for(store: AccessStore, clock: ManualClock) -> None:
    key = make_key(store, "ci", "operator", tenant="acme", expires_in=HOUR)
    assert SECRET.fullmatch(key.secret)
    assert key.info == KeyInfo(
        key_id=key.secret[3:19],
        name="ci",
        kind="key",
        role="operator",
        tenant="acme",
        created_at=clock.now(),
        created_by="root",
        expires_at=clock.now() + timedelta(hours=1),
    )
    actor = Actor(name="ci", role="operator", tenant="acme", via="rest", key_id=key.info.key_id)
    assert store.admit(key.secret, rate=1.0, burst=1) == Admission(actor=actor, wait=0.0)


def test_no_secret_is_stored_or_shown(store: AccessStore, redis_client: redis.Redis) -> None:
    key = make_key(store)
    login = store.create_login(Actor(name="ann"))
    session = store.redeem(key.secret)
    assert session is not None
    shown = repr([key, session, store.keys()]) + str(key) + repr(dump(redis_client))
    for secret in (key.secret, login, session.secret):
        assert secret[20:] not in shown


def test_two_keys_differ_in_id_and_secret(store: AccessStore) -> None:
    first, second = make_key(store), make_key(store)
    assert first.info.key_id != second.info.key_id
    assert first.secret[20:] != second.secret[20:]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": ""}, "name of a key must be .*, not ''"),
        ({"name": "x" * 201}, "name of a key"),
        ({"name": 7}, "name of a key must be .*, not 7"),
        ({"role": "root"}, "role must .*not 'root'"),
        ({"role": ["admin"]}, "role"),
        ({"tenant": "a/b"}, "tenant must .*not 'a/b'"),
        ({"by": ""}, "by must .*not ''"),
        ({"expires_in": 0}, "expires_in must .*not 0"),
        ({"expires_in": float("nan")}, "expires_in must .*not nan"),
        ({"expires_in": "1h"}, "expires_in must .*not '1h'"),
    ],
)
def test_a_key_that_cannot_be_is_refused_and_nothing_is_stored(
    store: AccessStore, redis_client: redis.Redis, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        make_key(store, **arguments)
    assert dump(redis_client) == {}


def test_keys_are_listed_newest_first_without_sessions(store: AccessStore, world: World) -> None:
    made = []
    for name in ("one", "two", "three"):
        made.append(make_key(store, name))
        world.advance(1)
    store.redeem(made[0].secret)
    store.create_login(Actor(name="ann"))
    assert store.keys() == [key.info for key in reversed(made)]


def test_a_key_ends_when_it_was_to(store: AccessStore, clock: ManualClock) -> None:
    key = make_key(store, expires_in=timedelta(hours=1))
    clock.advance(HOUR - 0.001)
    assert admit(store, key.secret) is not None
    clock.advance(0.001)
    assert admit(store, key.secret) is None
    assert store.keys() == []
    assert store.redeem(key.secret) is None


def test_a_revoked_key_lets_nobody_in(store: AccessStore, redis_client: redis.Redis) -> None:
    key, other = make_key(store), make_key(store, "other")
    assert admit(store, key.secret) is not None
    assert store.revoke(key.info.key_id) is True
    assert store.revoke(key.info.key_id) is False
    assert admit(store, key.secret) is None
    assert store.keys() == [other.info]
    assert key.info.key_id not in repr({**dump(redis_client), "ops": None})


@pytest.mark.parametrize("key_id", ["", "x" * 16, "0123456789ABCDEF", 7, None])
def test_what_is_no_id_of_a_key_cannot_be_revoked(store: AccessStore, key_id: Any) -> None:
    with pytest.raises(InvalidInput, match="key_id"):
        store.revoke(key_id)


def test_as_many_keys_as_the_queue_holds_and_no_more(
    store: AccessStore, redis_of: Callable[..., Any], clock: ManualClock
) -> None:
    make_key(store, expires_in=HOUR)
    entries = [part for n in range(MAX_KEYS - 1) for part in (n, f"{n:016x}")]
    redis_of("ZADD", "api_keys", *entries)
    with pytest.raises(QueueFull, match="10000 keys already: revoke"):
        make_key(store)
    clock.advance(HOUR)
    assert make_key(store).info.kind == "key"  # what has ended makes room


# --- secrets that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "fq_",
        "fq_0123456789abcdef_" + "a" * 42,
        "fq_0123456789abcdef_" + "a" * 44,
        "fq_0123456789abcdef_" + "a" * 43 + "\n",
        "fq_0123456789abcdeF_" + "a" * 43,
        "fq_0123456789abcdef_" + "\u00e4" * 43,
        "x" * 1_000_000,
        b"fq_0123456789abcdef_" + b"a" * 43,
        None,
        7,
    ],
    ids=range(11),
)
def test_what_has_not_the_form_of_a_secret_costs_no_round_trip(world: World, secret: Any) -> None:
    with TaskQueue.from_url("redis://127.0.0.1:1/0", clock=world.clock, timeout=0.1) as nowhere:
        store = AccessStore(nowhere.link)
        assert store.admit(secret, rate=1.0, burst=1) == Admission(actor=None, wait=0.0)
        assert store.redeem(secret) is None
        store.end(secret)


def test_an_unknown_secret_opens_nothing(store: AccessStore, redis_client: redis.Redis) -> None:
    secret = "fq_0123456789abcdef_" + "a" * 43
    assert admit(store, secret) is None
    assert store.redeem(secret) is None
    store.end(secret)
    assert dump(redis_client).keys() <= {"ops"}


def test_a_wrong_secret_opens_nothing_and_uses_nothing_up(store: AccessStore) -> None:
    key = make_key(store)
    wrong = altered(key.secret)
    for _ in range(5):
        assert store.admit(wrong, rate=0.001, burst=1) == Admission(actor=None)
    assert store.redeem(wrong) is None
    assert store.admit(key.secret, rate=0.001, burst=1).wait == 0
    assert store.admit(wrong, rate=0.001, burst=1) == Admission(actor=None)


# --- pace -----------------------------------------------------------------------------------------


def test_requests_come_in_bursts_and_then_at_their_rate(store: AccessStore, world: World) -> None:
    key = make_key(store)

    def waits(count: int) -> list[float]:
        return [store.admit(key.secret, rate=10.0, burst=3).wait for _ in range(count)]

    assert waits(4) == [0, 0, 0, 0.1]
    world.advance(0.06)
    assert waits(1) == [0.04]
    world.advance(0.04)
    assert waits(2) == [0, 0.1]
    world.advance(HOUR)
    assert waits(4) == [0, 0, 0, 0.1]


def test_who_has_to_wait_is_known(store: AccessStore) -> None:
    key = make_key(store)
    first = store.admit(key.secret, rate=1.0, burst=1)
    assert store.admit(key.secret, rate=1.0, burst=1) == Admission(actor=first.actor, wait=1.0)


def test_credentials_do_not_share_their_pace(store: AccessStore) -> None:
    key, other = make_key(store), make_key(store)
    session = store.redeem(key.secret)
    assert session is not None
    waits = [
        store.admit(each, rate=1.0, burst=1).wait
        for each in (key.secret, other.secret, session.secret)
    ]
    assert waits == [0, 0, 0]


def test_a_clock_that_was_set_back_locks_nobody_out(store: AccessStore, clock: ManualClock) -> None:
    key = make_key(store)
    store.admit(key.secret, rate=1.0, burst=2)
    clock.advance(-1_000_000)
    assert store.admit(key.secret, rate=1.0, burst=2).wait == 1.0
    clock.advance(1)
    assert store.admit(key.secret, rate=1.0, burst=2).wait == 0


@pytest.mark.parametrize("spoilt", ["x", "nan", "inf", ""])
def test_a_pace_that_somebody_has_spoilt_mends_itself(
    store: AccessStore, redis_of: Callable[..., Any], clock: ManualClock, spoilt: str
) -> None:
    key = make_key(store)
    redis_of("HSET", "api_pace", key.info.key_id, spoilt)
    store.admit(key.secret, rate=1.0, burst=1)
    clock.advance(1)
    assert [store.admit(key.secret, rate=1.0, burst=1).wait for _ in range(2)] == [0, 1.0]


@pytest.mark.parametrize(
    ("rate", "burst", "named"),
    [
        (0, 1, "rate must .*not 0"),
        (-1.0, 1, "rate"),
        ("x", 1, "rate"),
        (1.0, 0, "burst must .*not 0"),
        (1.0, 1.5, "burst"),
    ],
)
def test_a_bad_pace_is_refused(store: AccessStore, rate: Any, burst: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        store.admit("x", rate=rate, burst=burst)


# --- logins and sessions --------------------------------------------------------------------------


def test_a_login_becomes_a_session_of_its_actor(store: AccessStore, clock: ManualClock) -> None:
    login = store.create_login(Actor(name="ann", role="viewer", tenant="acme", via="cli"))
    assert SECRET.fullmatch(login)
    session = store.redeem(login)
    assert session is not None
    assert session.info == KeyInfo(
        key_id=session.secret[3:19],
        name="ann",
        kind="session",
        role="viewer",
        tenant="acme",
        created_at=clock.now(),
        created_by="ann",
        expires_at=clock.now() + timedelta(hours=12),
    )
    actor = admit(store, session.secret)
    assert actor == Actor(
        name="ann", role="viewer", tenant="acme", via="web", key_id=session.info.key_id
    )


def test_a_login_is_used_up_by_its_first_use(store: AccessStore) -> None:
    login = store.create_login(Actor(name="ann"))
    assert store.redeem(login) is not None
    assert store.redeem(login) is None


def test_a_wrong_secret_does_not_use_up_a_login(store: AccessStore) -> None:
    login = store.create_login(Actor(name="ann"))
    assert store.redeem(altered(login)) is None
    assert store.redeem(login) is not None


def test_a_login_by_itself_lets_nobody_in(store: AccessStore) -> None:
    assert admit(store, store.create_login(Actor(name="ann"))) is None


def test_a_login_ends_when_it_was_to(store: AccessStore, clock: ManualClock) -> None:
    early, late = (store.create_login(Actor(name="ann"), seconds=60) for _ in range(2))
    clock.advance(59.999)
    assert store.redeem(early) is not None
    clock.advance(0.001)
    assert store.redeem(late) is None


def test_only_one_of_many_who_redeem_a_login_gets_a_session(store: AccessStore) -> None:
    login = store.create_login(Actor(name="ann"))
    together = threading.Barrier(8)

    def redeem(_: int) -> NewKey | None:
        together.wait(30)
        return store.redeem(login)

    with ThreadPoolExecutor(8) as pool:
        found = [each for each in pool.map(redeem, range(8)) if each is not None]
    assert len(found) == 1
    assert admit(store, found[0].secret) is not None


def test_a_lost_reply_repeats_no_call(far: TaskQueue, proxy: LossyProxy) -> None:
    store = AccessStore(far.link)
    losing = proxy.losing
    key = losing(lambda: make_key(store))
    login = losing(lambda: store.create_login(Actor(name="ann")))
    session = losing(lambda: store.redeem(login))
    assert losing(lambda: admit(store, session.secret)).name == "ann"
    losing(lambda: store.end(session.secret))
    assert admit(store, session.secret) is None
    assert losing(lambda: store.revoke(key.info.key_id)) is True
    assert store.keys() == []


def test_a_key_that_is_made_again_is_the_one_that_was_made(world: World) -> None:
    record = '{"kind":"key","name":"ci","role":"admin","by":"root","hash":"x"}'
    call: dict[str, Any] = {
        "op": "o",
        "id": "0" * 16,
        "record": record,
        "ttl_ms": 1000,
        "source": "",
    }
    answer, state = world.queue.link.run("add_credential", **call), world.dump()
    world.advance(30)
    assert world.queue.link.run("add_credential", **call) == answer
    assert world.dump() == state


def test_a_session_ends_after_its_time(store: AccessStore, clock: ManualClock) -> None:
    session = store.redeem(make_key(store).secret)
    assert session is not None
    clock.advance(12 * HOUR - 0.001)
    assert admit(store, session.secret) is not None
    clock.advance(0.001)
    assert admit(store, session.secret) is None


def test_a_session_does_not_outlive_its_key(store: AccessStore, clock: ManualClock) -> None:
    key = make_key(store, expires_in=HOUR)
    session = store.redeem(key.secret)
    assert session is not None
    assert session.info.expires_at == key.info.expires_at


def test_a_session_cannot_be_turned_into_another_one(store: AccessStore) -> None:
    session = store.redeem(make_key(store).secret)
    assert session is not None
    assert store.redeem(session.secret) is None


def test_who_logs_out_ends_their_session_and_no_other(store: AccessStore) -> None:
    key = make_key(store)
    mine, other = store.redeem(key.secret), store.redeem(key.secret)
    assert mine is not None
    assert other is not None
    store.end(altered(mine.secret))
    assert admit(store, mine.secret) is not None
    store.end(mine.secret)
    store.end(mine.secret)
    store.end(key.secret)
    assert admit(store, mine.secret) is None
    assert admit(store, other.secret) is not None
    assert admit(store, key.secret) is not None


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), "x", 40 * 86_400])
def test_a_session_or_login_of_no_length_is_refused(store: AccessStore, seconds: Any) -> None:
    with pytest.raises(InvalidInput, match="seconds"):
        store.create_login(Actor(name="ann"), seconds=seconds)
    with pytest.raises(InvalidInput, match="seconds"):
        store.redeem("x", seconds=seconds)


# --- what came from a key goes with it ------------------------------------------------------------


def test_a_revoked_key_ends_its_sessions(store: AccessStore, redis_client: redis.Redis) -> None:
    key, other = make_key(store), make_key(store)
    mine, others = store.redeem(key.secret), store.redeem(other.secret)
    assert mine is not None
    assert others is not None
    actor = admit(store, mine.secret)
    assert actor is not None
    login = store.create_login(actor)
    used = store.redeem(store.create_login(actor))
    assert used is not None
    store.revoke(key.info.key_id)
    assert [admit(store, each) for each in (mine.secret, used.secret)] == [None, None]
    assert store.redeem(login) is None
    assert admit(store, others.secret) is not None
    left = {other.info.key_id, others.info.key_id}
    state = dump(redis_client)
    assert set(state["credentials"]) == left
    assert set(state["sessions"]) == {others.info.key_id}
    assert set(state["credential_ends"]) == {others.info.key_id}


def test_a_session_ends_with_its_key(store: AccessStore, redis_of: Callable[..., Any]) -> None:
    key = make_key(store)
    session = store.redeem(key.secret)
    assert session is not None
    redis_of("HDEL", "credentials", key.info.key_id)
    assert admit(store, session.secret) is None


def test_one_session_can_be_revoked(store: AccessStore) -> None:
    key = make_key(store)
    session = store.redeem(key.secret)
    assert session is not None
    assert store.revoke(session.info.key_id) is True
    assert admit(store, session.secret) is None
    assert admit(store, key.secret) is not None


def test_who_was_let_in_once_makes_no_login_after_their_key_is_revoked(store: AccessStore) -> None:
    key = make_key(store, "ci")
    actor = admit(store, key.secret)
    assert actor is not None
    store.revoke(key.info.key_id)
    with pytest.raises(Forbidden, match="of 'ci' has ended"):
        store.create_login(actor)


def test_a_login_does_not_outlive_its_session(store: AccessStore, clock: ManualClock) -> None:
    first = store.redeem(store.create_login(Actor(name="ann")), seconds=HOUR)
    assert first is not None
    actor = admit(store, first.secret)
    assert actor is not None
    second = store.redeem(store.create_login(actor), seconds=2 * HOUR)
    assert second is not None
    assert second.info.expires_at == first.info.expires_at
    store.end(first.secret)
    assert admit(store, second.secret) is None


# --- bounded, and robust --------------------------------------------------------------------------


def test_what_has_ended_is_dropped_when_others_are_made(store: AccessStore, world: World) -> None:
    for _ in range(3):
        session = store.redeem(make_key(store, expires_in=HOUR).secret)
        assert session is not None
        admit(store, session.secret)
    world.advance(HOUR)
    new = make_key(store)
    state = world.dump()
    assert set(state["credentials"]) == set(state["api_keys"]) == {new.info.key_id}
    assert not {"sessions", "credential_ends", "api_pace"} & state.keys()


def test_the_clean_up_of_one_call_is_bounded(
    store: AccessStore, redis_of: Callable[..., Any], clock: ManualClock
) -> None:
    entries = [part for n in range(250) for part in (n, f"{n:016x}")]
    redis_of("ZADD", "credential_ends", *entries)
    redis_of("ZADD", "sessions", *entries)
    left = []
    for _ in range(4):
        make_key(store)
        left.append(redis_of("ZCARD", "sessions"))
    assert left == [150, 50, 0, 0]


def test_the_oldest_sessions_make_room_for_new_ones(
    store: AccessStore, redis_of: Callable[..., Any], clock: ManualClock
) -> None:
    key = make_key(store)
    first = store.redeem(key.secret)
    assert first is not None
    clock.advance(1)
    entries = [part for n in range(9_999) for part in (clock.now_ms(), f"{n:016x}")]
    redis_of("ZADD", "sessions", *entries)
    second = store.redeem(key.secret)
    assert second is not None
    assert admit(store, first.secret) is None
    assert admit(store, second.secret) is not None
    assert redis_of("ZCARD", "sessions") == 10_000


def test_all_sessions_of_a_key_are_found_among_many(
    store: AccessStore, redis_client: redis.Redis, redis_of: Callable[..., Any]
) -> None:
    key, other = make_key(store), make_key(store)
    for n in range(1200):
        parent = (key if n % 2 else other).info.key_id
        record = json.dumps({"kind": "session", "parent": parent}, separators=(",", ":"))
        redis_of("HSET", "credentials", f"{n:016x}", record)
    redis_of("ZADD", "sessions", *(part for n in range(1200) for part in (n, f"{n:016x}")))
    store.revoke(key.info.key_id)
    left = {f"{n:016x}" for n in range(0, 1200, 2)}
    state = dump(redis_client)
    assert set(state["sessions"]) == left
    assert set(state["credentials"]) == left | {other.info.key_id}


def test_logins_work_without_memory_in_redis(
    own_server: Callable[..., EmbeddedServer],
) -> None:
    url = own_server().url
    with TaskQueue.from_url(url) as full, redis.Redis.from_url(url) as client:
        full.check()
        client.config_set("maxmemory", 1)
        with pytest.raises(RedisRefused):
            full.push(make_task())
        store, log, replies = AccessStore(full.link), AuditLog(full.link), ReplyStore(full.link)
        session = store.redeem(store.create_login(Actor(name="ann")))
        assert session is not None
        actor = admit(store, session.secret)
        assert actor is not None
        assert replies.begin("k", "d").state == "new"
        assert log.end(log.begin(actor, "task.cancel", "t1"), "done") is True
        assert replies.done("k", 200, {}, "") is True
        assert store.revoke(session.info.key_id) is True


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_record_that_somebody_has_spoilt_counts_as_none(
    store: AccessStore, redis_of: Callable[..., Any], garbage: str
) -> None:
    key, good = make_key(store), make_key(store)
    session = store.redeem(key.secret)
    assert session is not None
    redis_of("HSET", "credentials", key.info.key_id, garbage.encode("utf-8", "surrogateescape"))
    assert [admit(store, each.secret) for each in (key, session)] == [None, None]
    assert store.redeem(key.secret) is None
    assert store.keys() == [good.info]
    assert store.revoke(key.info.key_id) is True
    assert redis_of("ZCARD", "api_keys") == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("role", "root"), ("role", None), ("name", ""), ("name", 7), ("tenant", "a b"), ("ends", "x")],
)
def test_a_record_with_a_field_that_cannot_be_lets_nobody_in(
    store: AccessStore, redis_of: Callable[..., Any], field: str, value: Any
) -> None:
    key = make_key(store)
    record = json.loads(redis_of("HGET", "credentials", key.info.key_id))
    redis_of("HSET", "credentials", key.info.key_id, json.dumps({**record, field: value}))
    assert admit(store, key.secret) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("parent", value) for value in NO_PARENTS],
        *[("ends", value) for value in NO_ENDS],
        ("hash", []),
        ("kind", None),
    ],
)
def test_a_session_with_a_field_that_cannot_be_holds_no_longer_and_others_do(
    store: AccessStore, redis_of: Callable[..., Any], field: str, value: Any
) -> None:
    key = make_key(store)
    spoilt, good = store.redeem(key.secret), store.redeem(key.secret)
    assert spoilt is not None
    assert good is not None
    record = json.loads(redis_of("HGET", "credentials", spoilt.info.key_id))
    redis_of("HSET", "credentials", spoilt.info.key_id, json.dumps({**record, field: value}))
    asked = {each.info.key_id for each in (key, spoilt, good)}
    assert store.holding(asked) == {key.info.key_id, good.info.key_id}
    assert admit(store, spoilt.secret) is None


def test_a_key_may_hold_for_a_second_at_least(store: AccessStore, clock: ManualClock) -> None:
    key = make_key(store, expires_in=1)
    assert admit(store, key.secret) is not None
    clock.advance(1)
    assert admit(store, key.secret) is None
    with pytest.raises(InvalidInput, match=r"expires_in must .*not 0\.999"):
        make_key(store, expires_in=0.999)
