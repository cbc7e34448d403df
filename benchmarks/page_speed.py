"""Pages and lists over a large data set: server time of each, and the cost of event streams."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.common import Bench
from benchmarks.large_queue import seed_large
from fairqueue.inspection import Inspector
from fairqueue.web import create_app
from fairqueue.web.app import reader
from fairqueue.web.live_updates import LiveUpdates
from fairqueue.web.missing import Absences

SCHEDULES, RUNS, USERS = 10_000, 100_000, 500
MOST = 30  # single round trips for one page
# All 10,000 entries are examined, because none matches.
MOST_OF = {"/schedules?text=000123": 150, "/schedules?status=paused": 600}
REPEATS = 30
PATHS = {
    "overview": "/",
    "schedules": "/schedules",
    "schedules, found by a part of the name": "/schedules?text=000123",
    "schedules, not active where all are": "/schedules?status=paused",
    "users by backlog": "/users",
    "users from A to Z": "/users?order=name",
    "runs": "/runs",
    "failed": "/failed",
    "audit": "/audit",
    "REST: a page of 25 jobs": "/api/v1/scheduler/jobs?limit=25",
    "REST: a page of 25 runs": "/api/v1/scheduler/runs?limit=25",
}

App = Callable[..., Awaitable[None]]


def run(bench: Bench) -> None:
    queue = bench.fresh_queue()
    seed_large(queue, bench.count(SCHEDULES), bench.count(RUNS), USERS)
    pages(bench, create_app(queue, auth=False))
    streams(bench, Inspector(queue))
    queue.close()


def pages(bench: Bench, app: App) -> None:
    """Return the median time of a page, from the request to the last byte, without the network."""

    async def measure() -> None:
        for name, path in PATHS.items():
            status, size = await get(app, path)
            if status != 200:
                raise SystemExit(f"{path} answered {status}")
            ratios, taken = [], []
            for _ in range(5):
                before = 1 / bench.unit_s()
                times = []
                for _ in range(REPEATS // 5):
                    start = time.perf_counter()
                    await get(app, path)
                    times.append(time.perf_counter() - start)
                unit = (before + 1 / bench.unit_s()) / 2
                taken.append(statistics.median(times))
                ratios.append(taken[-1] / unit)
            ratio = statistics.median(ratios)
            note = f"{statistics.median(taken) * 1000:.1f} ms, {size / 1024:.0f} KiB"
            most = MOST_OF.get(path, MOST)
            bench.add(f"page: {name}", f"{ratio:.0f} round trips", f"≤ {most}", ratio <= most, note)

    asyncio.run(measure())


async def get(app: App, path: str) -> tuple[int, int]:
    """Return status and size of the app's answer to a request."""
    route, _, query = path.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": route,
        "raw_path": route.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"accept", b"text/html, application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"]), sum(len(each.get("body", b"")) for each in sent)


def streams(bench: Bench, inspector: Inspector) -> None:
    """Count the commands of one round of the event stream, with one viewer and with fifty."""

    absences = Absences(inspector.queue.link)

    async def commands_for(viewers: int) -> int:
        live_updates = LiveUpdates(reader(inspector, absences), poll=3600)
        before = int(bench.client.info("stats")["total_commands_processed"])
        streams = [live_updates.stream(None, None) for _ in range(viewers)]
        for stream in streams:
            async for message in stream:
                if message.startswith(b"event: numbers"):
                    break
        after = int(bench.client.info("stats")["total_commands_processed"])
        for stream in streams:
            await stream.aclose()
        live_updates.close()
        return after - before - 1  # without INFO itself

    asyncio.run(commands_for(1))  # loads the scripts
    one, fifty = asyncio.run(commands_for(1)), asyncio.run(commands_for(50))
    figure = f"{one} and {fifty}"
    bench.add("event stream: commands for 1 and 50 viewers", figure, "the same", fifty <= one)
