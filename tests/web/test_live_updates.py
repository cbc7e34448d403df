"""One poller for all pages: what viewers get, when streams end, and what it costs."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import httpx
import pytest
import redis
from helpers.browser import Site, Web
from helpers.tasks import fill
from helpers.world import World

from fairqueue.access.credentials import AccessStore
from fairqueue.errors import RedisUnavailable
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.web import live_updates as hub_module
from fairqueue.web.app import reader
from fairqueue.web.cache import Cache
from fairqueue.web.live_updates import LiveUpdates, Numbers, Viewer
from fairqueue.web.missing import Absences

PATIENCE_S = 30.0


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene on an event loop of its own."""
    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


async def numbers_of(stream: AsyncIterator[bytes]) -> dict[str, Any]:
    """The next numbers of a stream."""
    async for message in stream:
        if message.startswith(b"event: numbers"):
            found: dict[str, Any] = json.loads(message.split(b"data: ")[1])
            return found
    raise AssertionError("the stream ended")


def counting() -> tuple[Callable[[str | None], Numbers], list[str | None]]:
    """A reader whose numbers are how often it was asked, and its calls."""
    calls: list[str | None] = []

    def read(tenant: str | None) -> Numbers:
        calls.append(tenant)
        return {"n": len(calls)}

    return read, calls


def test_all_viewers_get_what_was_read_once() -> None:
    async def scene() -> None:
        read, calls = counting()
        live_updates = LiveUpdates(read, poll=3600)
        streams = [live_updates.stream(None, None) for _ in range(50)]
        seen = await asyncio.gather(*map(numbers_of, streams))
        assert (seen, calls, live_updates.viewers) == ([{"n": 1}] * 50, [None], 50)
        for stream in streams:
            await stream.aclose()
        assert live_updates.viewers == 0
        live_updates.close()

    play(scene)


@pytest.mark.parametrize("viewers", [1, 50])
def test_fifty_viewers_cost_redis_what_one_does(world: World, viewers: int) -> None:
    world.fill("alice", 3)
    read = reader(Inspector(world.queue), Absences(world.queue.link))
    read(None)  # scripts are loaded
    rounds = 5

    def commands() -> int:
        return int(world.redis.info("stats")["total_commands_processed"])

    before = commands()
    for _ in range(rounds):
        read(None)
    alone = commands() - before - 1  # less the question itself

    async def scene() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        done = 0

        def bounded(tenant: str | None) -> Numbers:
            nonlocal done
            if done == rounds:
                loop.call_soon_threadsafe(over.set)
                return {}
            done += 1
            return read(tenant)

        live_updates = LiveUpdates(bounded, poll=0.01)
        streams = [live_updates.stream(None, None) for _ in range(viewers)]
        await asyncio.gather(*map(numbers_of, streams))
        await over.wait()
        live_updates.close()
        for stream in streams:
            await stream.aclose()

    before = commands()
    play(scene)
    assert commands() - before - 1 == alone


def test_nothing_is_read_while_nobody_looks() -> None:
    async def scene() -> None:
        read, calls = counting()
        live_updates = LiveUpdates(read, poll=0.001)
        stream = live_updates.stream(None, None)
        await numbers_of(stream)
        poller = live_updates._poller
        await stream.aclose()
        assert poller is not None
        await poller  # it ends by itself
        asked = len(calls)
        again = live_updates.stream(None, None)
        assert (await numbers_of(again))["n"] == asked + 1  # and nothing old is shown
        await again.aclose()
        live_updates.close()

    play(scene)


def test_who_comes_later_sees_the_newest_numbers_at_once() -> None:
    async def scene() -> None:
        read, calls = counting()
        live_updates = LiveUpdates(read, poll=3600)
        first = live_updates.stream(None, None)
        await numbers_of(first)
        second = live_updates.stream(None, None)
        assert await numbers_of(second) == {"n": 1}
        assert calls == [None]
        live_updates.close()
        await first.aclose()
        await second.aclose()

    play(scene)


def test_a_viewer_that_is_slow_gets_only_the_newest() -> None:
    async def scene() -> None:
        enough = threading.Event()
        calls = 0

        def read(tenant: str | None) -> Numbers:
            nonlocal calls
            calls += 1
            if calls == 5:
                enough.set()
            return {"n": min(calls, 5)}

        live_updates = LiveUpdates(read, poll=0.001)
        stream = live_updates.stream(None, None)
        assert await anext(stream) == b"retry: 2000\n\n"
        while not enough.is_set():
            await asyncio.sleep(0.001)
        seen = [await numbers_of(stream)]
        while seen[-1] != {"n": 5}:
            seen.append(await numbers_of(stream))
        assert len(seen) <= 2
        live_updates.close()
        await stream.aclose()

    play(scene)


def test_viewers_of_a_tenant_get_what_was_read_for_it() -> None:
    async def scene() -> None:
        live_updates = LiveUpdates(lambda tenant: {"of": tenant}, poll=3600)
        streams = {tenant: live_updates.stream(tenant, None) for tenant in (None, "acme", "globex")}
        seen = await asyncio.gather(*map(numbers_of, streams.values()))
        assert [each["of"] for each in seen] == list(streams)
        live_updates.close()
        for stream in streams.values():
            await stream.aclose()

    play(scene)


def test_a_quiet_stream_says_that_it_is_alive() -> None:
    async def scene() -> None:
        live_updates = LiveUpdates(lambda tenant: {}, poll=3600, heartbeat=0.01)
        stream = live_updates.stream(None, None)
        await numbers_of(stream)
        assert await anext(stream) == b": alive\n\n"
        live_updates.close()
        await stream.aclose()

    play(scene)


def test_a_stream_ends_after_its_time_so_that_the_gate_is_asked_again() -> None:
    async def scene() -> None:
        live_updates = LiveUpdates(lambda tenant: {}, poll=3600, stream=0.01)
        seen = [message async for message in live_updates.stream(None, None)]
        assert seen[0] == b"retry: 2000\n\n"
        assert live_updates.viewers == 0
        live_updates.close()

    play(scene)


def test_viewers_see_when_redis_goes_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        back = threading.Event()

        def read(tenant: str | None) -> Numbers:
            if not back.is_set():
                raise RedisUnavailable("gone")
            return {"n": 1}

        live_updates = LiveUpdates(read, poll=0.001)
        stream = live_updates.stream(None, None)
        assert await numbers_of(stream) == {"unavailable": True}
        back.set()
        assert await numbers_of(stream) == {"n": 1}
        live_updates.close()
        await stream.aclose()

    play(scene)
    assert [vars(record)["event"] for record in caplog.records] == [
        "poll_failed"
    ]  # not once per round


def test_all_viewers_are_told_while_redis_lets_one_call_wait() -> None:
    async def scene() -> None:
        stuck, back = threading.Event(), threading.Event()

        def read(tenant: str | None) -> Numbers:
            if stuck.is_set():
                back.wait(PATIENCE_S)  # as a call does that is repeated until its deadline
            return {"of": tenant}

        live_updates = LiveUpdates(read, poll=0.001, answer=0.01)
        streams = {tenant: live_updates.stream(tenant, None) for tenant in (None, "acme", "globex")}
        for tenant, stream in streams.items():
            assert await numbers_of(stream) == {"of": tenant}
        stuck.set()
        for stream in streams.values():
            assert await numbers_of(stream) == {"unavailable": True}
        stuck.clear()
        back.set()
        for tenant, stream in streams.items():
            assert await numbers_of(stream) == {"of": tenant}
        live_updates.close()
        for stream in streams.values():
            await stream.aclose()

    play(scene)


def test_what_was_over_before_a_viewer_saw_it_is_not_told() -> None:
    async def scene() -> None:
        viewer = Viewer(None, None)
        messages = viewer.messages(PATIENCE_S, 0.01)
        viewer.show(b"1")
        assert await anext(messages) == b"retry: 2000\n\n"
        assert await anext(messages) == b"event: numbers\ndata: 1\n\n"
        viewer.show(b"unavailable")
        viewer.show(b"1")
        assert await anext(messages) == b": alive\n\n"
        await messages.aclose()

    play(scene)


def test_a_silence_is_told_within_two_seconds() -> None:
    assert hub_module.POLL_S + hub_module.ANSWER_S <= 2.0


def test_ending_a_session_ends_its_streams_and_no_others() -> None:
    async def scene() -> None:
        live_updates = LiveUpdates(lambda tenant: {}, poll=3600)
        mine, other = live_updates.stream(None, "mine"), live_updates.stream(None, "other")
        await asyncio.gather(numbers_of(mine), numbers_of(other))
        live_updates.end("mine")
        assert [message async for message in mine] == []
        assert live_updates.viewers == 1
        live_updates.close()
        assert [message async for message in other] == []

    play(scene)


def test_holders_are_asked_again_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        spoilt = threading.Event()

        def holding(key_ids: Collection[str]) -> Collection[str]:
            if spoilt.is_set():
                spoilt.clear()
                raise TypeError("a record that nobody expected")
            return {"good"} & set(key_ids)

        read, _ = counting()
        live_updates = LiveUpdates(read, holding=holding, poll=0.001, check=0.0)
        first, local = live_updates.stream(None, "good"), live_updates.stream(None, None)
        await asyncio.gather(numbers_of(first), numbers_of(local))
        spoilt.set()
        async for _message in first:
            pass  # nobody knows whether it may go on: it ends, and its page comes again
        again, revoked = live_updates.stream(None, "good"), live_updates.stream(None, "revoked")
        async for _message in revoked:
            pass
        for stream in (local, again):
            count = (await numbers_of(stream))["n"]
            assert (await numbers_of(stream))["n"] > count
        live_updates.close()
        await again.aclose()
        await local.aclose()

    play(scene)
    assert [vars(record)["event"] for record in caplog.records] == ["check_failed"]


def test_streams_go_on_while_redis_cannot_say_who_may_look() -> None:
    async def scene() -> None:
        asked = threading.Event()

        def holding(key_ids: Collection[str]) -> Collection[str]:
            asked.set()
            raise RedisUnavailable("gone")

        read, _ = counting()
        live_updates = LiveUpdates(read, holding=holding, poll=0.001, check=0.0)
        stream = live_updates.stream(None, "good")
        await numbers_of(stream)
        while not asked.is_set():
            await asyncio.sleep(0.001)
        await numbers_of(stream)
        await numbers_of(stream)
        live_updates.close()
        await stream.aclose()

    play(scene)


def test_numbers_that_cannot_be_told_do_not_end_the_poller() -> None:
    async def scene() -> None:
        mended = threading.Event()

        def read(tenant: str | None) -> Numbers:
            return {"n": 1 if mended.is_set() else object()}

        live_updates = LiveUpdates(read, poll=0.001)
        stream = live_updates.stream(None, None)
        assert await numbers_of(stream) == {"unavailable": True}
        mended.set()
        assert await numbers_of(stream) == {"n": 1}
        live_updates.close()
        await stream.aclose()

    play(scene)


@pytest.mark.parametrize("parent", [[], {}, None, "\ud800"])
def test_a_spoilt_credential_ends_only_its_own_streams(world: World, parent: Any) -> None:
    store = AccessStore(world.queue.link)
    good, spoilt = (store.create_key(name, "viewer", by="root") for name in ("good", "spoilt"))
    credentials = world.keys["credentials"]

    async def scene() -> None:
        read, _ = counting()
        live_updates = LiveUpdates(read, holding=store.holding, poll=0.001, check=0.0)
        ends, goes_on = (live_updates.stream(None, key.info.key_id) for key in (spoilt, good))
        await asyncio.gather(numbers_of(ends), numbers_of(goes_on))
        record = json.loads(world.redis.hget(credentials, spoilt.info.key_id) or b"")
        text = json.dumps({**record, "parent": parent})
        world.redis.hset(credentials, spoilt.info.key_id, text)
        async for _message in ends:
            pass
        await numbers_of(goes_on)
        store.revoke(good.info.key_id)
        async for _message in goes_on:
            pass
        assert live_updates.viewers == 0
        live_updates.close()

    play(scene)


# --- over the wire --------------------------------------------------------------------------------


def read_events(site: Site, headers: dict[str, str], ended: threading.Event) -> list[str]:
    """Read a stream until it ends; `ended` is set after its first numbers were seen."""
    lines: list[str] = []
    with httpx.stream("GET", f"{site.url}/events", headers=headers, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        for line in answer.iter_lines():
            lines.append(line)
            if line.startswith("data: "):
                ended.set()
    return lines


def start_reading(site: Site, headers: dict[str, str]) -> threading.Thread:
    """Read a stream in a thread; returns when its first numbers have come."""
    seen = threading.Event()
    thread = threading.Thread(target=read_events, args=(site, headers, seen), daemon=True)
    thread.start()
    assert seen.wait(PATIENCE_S)
    return thread


def first_numbers(site: Site, headers: dict[str, str]) -> dict[str, Any]:
    with httpx.stream("GET", f"{site.url}/events", headers=headers, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("no numbers came")


def test_the_stream_tells_the_numbers_of_the_overview(web: Web, queue: TaskQueue) -> None:
    fill(queue, "alice", 3)
    numbers = first_numbers(web(), {})
    assert (numbers["ready"], numbers["running"], numbers["counters"]["pushed"]) == (3, 0, 3)


def test_a_tenant_sees_no_counts_of_the_whole_queue(web: Web, queue: TaskQueue) -> None:
    fill(queue, "alice", 3)
    site = web(auth=True)
    numbers = first_numbers(site, {"X-API-Key": site.key(role="viewer", tenant="acme")})
    assert numbers["counters"] == {}
    assert numbers["ready"] in (None, 0)
    assert 3 not in numbers.values()


def test_logging_out_ends_the_streams_of_the_session(web: Web) -> None:
    site = web(auth=True)
    site.http.post("/login", data={"secret": site.key()})
    cookie = {"Cookie": "; ".join(f"{k}={v}" for k, v in site.http.cookies.items())}
    reading = start_reading(site, cookie)
    site.http.post("/logout", headers={"Sec-Fetch-Site": "same-origin"})
    reading.join(PATIENCE_S)
    assert not reading.is_alive()


def test_stopping_the_server_ends_open_streams(site: Site) -> None:
    reading = start_reading(site, {})
    assert site.server.stop(PATIENCE_S)
    reading.join(PATIENCE_S)
    assert not reading.is_alive()


def test_too_many_viewers_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_VIEWERS", 1)
    reading = start_reading(site, {})
    answer = site.http.get("/events")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    site.server.stop(PATIENCE_S)
    reading.join(PATIENCE_S)


# --- what open pages read -------------------------------------------------------------------------


def test_what_many_ask_for_at_the_same_time_is_read_once() -> None:
    cache, made, gate = Cache(3600), [], threading.Event()

    def make() -> int:
        gate.wait(PATIENCE_S)
        made.append(1)
        return 7

    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.get("k", make))) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (found, made) == ([7] * 10, [1])


def test_what_is_kept_is_made_again_after_its_time_and_after_an_error() -> None:
    brief = Cache(0.0)
    assert [brief.get("k", lambda n=n: n) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
    cache = Cache(3600)

    def fail() -> int:
        raise RedisUnavailable("gone")

    with pytest.raises(RedisUnavailable):
        cache.get("k", fail)
    assert cache.get("k", lambda: 1) == 1
    assert cache.get(("k", "acme"), lambda: 2) == 2


def test_open_pages_that_refresh_themselves_read_once_for_all(
    site: Site, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.app.state.fairqueue.cache, "_seconds", 3600)
    for path in ("/", "/charts/wait"):
        site.http.get(path)
        before = int(redis_client.info("stats")["total_commands_processed"])
        for _ in range(20):
            assert site.http.get(path).status_code == 200
        after = int(redis_client.info("stats")["total_commands_processed"])
        assert after - before == 1  # the question itself
