"""Fuzz the parsers, guided by coverage.

A parser of foreign text or bytes may refuse it only with an error of FairQueue, and must accept it
consistently. tests/proof/test_fuzz.py does the same with chosen values, through every entry point
and on a real server; this script searches for other values.

    python scripts/fuzz.py --seconds 60             all targets, in turn
    python scripts/fuzz.py --seconds 600 cron http  those whose names contain one of the words
    python scripts/fuzz.py --replay FILE            repeat an input that broke a target

Needs atheris, which is not a dependency of the project: its wheels are large, only for Linux, and
missing for some versions of Python. `pip install atheris`, or `pip install --target FOLDER atheris`
and PYTHONPATH.

Prints the seed. Exits with status 1 if a target failed, and prints the file with the input.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SEED = 1
SLOW_S = 20  # seconds for one input, on a busy machine; longer counts as a hang
MEMORY_MB = 2048
LONGEST = 4096  # bytes of an input
NOW_MS = 1_700_000_000_000
FOUND = 77  # libFuzzer's status for an input that broke a target

Target = Callable[[bytes], None]

# The initial inputs, from which the fuzzer derives others.
SEEDS: dict[str, list[bytes]] = {
    "cron": [
        b"0 9 * * 1-5",
        b"*/5 0-23/2 L JAN SUN#2",
        b"@daily",
        b"H H(0-7) * * *",
        b"0 0 29 2 *",
    ],
    "frequency": [b'"daily"', b'{"minute": "*/5", "hour": 9}', b'{"weekday": ["mon", "fri"]}'],
    "payload": [b'{"a": [1, 2.5, null, true, "x"], "b": {"c": {}}}', b'{"x": "\\ud83d\\ude00"}'],
    "http": [b"https://api.example/hooks?a=b#c", b"http://[::ffff:7f00:1]:80/", b"http://0x7f.1/"],
    "documents": [
        b'[{"schedule_id": "a", "user_id": "u", "every": 60, "windows": [{"days": [1]}]}]',
        b"- {schedule_id: a, user_id: u, cron_expr: '0 9 * * *', exclude: [2026-12-25]}",
    ],
    "records": [
        b'{"user":"u","name":"n","priority":3,"payload":{}}',
        b'{"state":"buried","user":"u","name":"n","level":3,"attempts":1,"pushed":1,"due":1}',
        b'{"user_id":"u","name":"n","priority":3,"payload":{},"metadata":{},"timezone":"UTC",'
        b'"cron_expr":"0 9 * * *","created":1,"updated":1}',
    ],
    "signature": [b"t=1700000000,v1=" + b"0" * 64],
}


def main(arguments: list[str] | None = None) -> int:
    """Run each target in its own process; return the exit status."""
    options = _options(arguments)
    if options.replay is not None:
        _targets()[options.replay.name.partition("-")[0]](options.replay.read_bytes())
        return 0
    try:
        importlib.import_module("atheris")
    except ImportError:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    if options.run is not None:
        _fuzz(options.run, options.seconds, options.folder)
    chosen = [
        name for name in SEEDS if not options.words or any(word in name for word in options.words)
    ]
    print(f"seed {SEED}, {options.seconds:g} s for {', '.join(chosen) or 'nothing'}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fairqueue-fuzz-"))
    failed = [name for name in chosen if not _run(name, options.seconds / len(chosen), folder)]
    for name in failed:
        for path in sorted(folder.glob(f"{name}-*")):
            print(f"{name} failed: python scripts/fuzz.py --replay {path}")
    return 1 if failed or not chosen else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of the names of targets")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--folder", type=Path, help="where inputs that break a target are kept")
    parser.add_argument("--replay", type=Path, help="such an input")
    parser.add_argument("--run", choices=list(SEEDS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run(name: str, seconds: float, folder: Path) -> bool:
    """Fuzz one target; False if it broke."""
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], capture_output=True, text=True, errors="replace"
    )
    lines = done.stderr.splitlines()
    told = [line for line in lines if "exec/s" in line or "DONE" in line]
    print(f"{name:10} {told[-1] if told else 'nothing was run'}")
    if done.returncode != 0:
        said = (line for line in lines if not line.startswith(("#", "INFO:")))
        print(done.stdout + "\n".join(said))
    return done.returncode == 0


def _fuzz(name: str, seconds: float, folder: Path) -> None:
    """Fuzz one target in this process, and end it."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["fairqueue"]):
        target = _targets()[name]
        target(SEEDS[name][0])  # so that all imports are instrumented
    seeds = folder / f"corpus of {name}"
    seeds.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (seeds / str(number)).write_bytes(seed)
    flags = {
        "max_total_time": max(1, round(seconds)),
        "seed": SEED,
        "timeout": SLOW_S,
        "rss_limit_mb": MEMORY_MB,
        "max_len": LONGEST,
        "artifact_prefix": f"{folder}/{name}-",
        "print_final_stats": 1,
    }
    atheris.Setup(
        [sys.argv[0], *(f"-{flag}={value}" for flag, value in flags.items()), str(seeds)], target
    )
    atheris.Fuzz()
    os._exit(0)


# --- the targets ----------------------------------------------------------------------------------


def _targets() -> dict[str, Target]:
    """Return all targets by name; imports the code they test."""
    from fairqueue.errors import FairQueueError

    def calm(target: Target) -> Target:
        def run(data: bytes) -> None:
            with suppress(FairQueueError):
                target(data)

        return run

    targets = (_cron, _frequency, _payload, _http, _documents, _records, _signature)
    return {target.__name__.removeprefix("_"): calm(target) for target in targets}


def _text(data: bytes) -> str:
    """Return any text, including lone surrogates, which come from file names and from JSON."""
    return data.decode("utf-8", "surrogateescape")


def _json(data: bytes) -> Any:
    """Return a JSON value, or a text if the input is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return _text(data)


def _cron(data: bytes) -> None:
    """An accepted rule has increasing fire times and a description."""
    from fairqueue.recurrence.kinds import compile_recurrence
    from fairqueue.recurrence.moments import describe

    recurrence = compile_recurrence(_text(data), "Europe/Berlin")
    first = recurrence.next_ms(NOW_MS)
    if first is not None:
        assert first > NOW_MS
        assert recurrence.latest_ms(first) == first
        second = recurrence.next_ms(first)
        assert second is None or second > first
    describe(_text(data), "Europe/Berlin")


def _frequency(data: bytes) -> None:
    """An accepted text is a valid cron expression."""
    from fairqueue.recurrence.cron import parse_cron
    from fairqueue.recurrence.frequency import as_cron

    parse_cron(as_cron(_json(data)))


def _payload(data: bytes) -> None:
    """An accepted payload is stored unchanged, and can be masked."""
    from fairqueue.inspection.masking import mask, unmask
    from fairqueue.validation import MAX_PAYLOAD_BYTES, check_payload, encode_json

    payload = check_payload(_json(data))
    text = encode_json(payload, "payload", MAX_PAYLOAD_BYTES)
    assert json.loads(text) == payload
    assert unmask(mask(payload), payload) == payload


def _http(data: bytes) -> None:
    """An accepted host is an address in canonical form, or a plain name."""
    import ipaddress

    from fairqueue.http_tasks.network import forbidding_rule
    from fairqueue.http_tasks.requests import _beginning
    from fairqueue.http_tasks.requests import request_of as _request_of

    value = _json(data)
    assert "@" not in _beginning(_text(data))
    request = _request_of(value if isinstance(value, dict) else {"url": value})
    host = request.target.host
    assert 1 <= request.target.port <= 65535
    if ":" in host or host.replace(".", "").isdigit():
        address = ipaddress.ip_address(host)
        assert str(address) == host
        forbidding_rule(address)
    else:
        assert set(host) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-_")
    assert "\r" not in request.target.path
    assert "\n" not in request.target.path


def _documents(data: bytes) -> None:
    """A text of either format is read or refused; a plan is computed for what was read."""
    from fairqueue.errors import FairQueueError
    from fairqueue.schedules.import_export import _read_all, load_schedules

    for format in ("json", "yaml"):
        with suppress(FairQueueError):
            _read_all(load_schedules(_text(data), format))


def _records(data: bytes) -> None:
    """Records in Redis may have been written by anyone."""
    from fairqueue.errors import FairQueueError
    from fairqueue.history.records import read_run
    from fairqueue.models import Task
    from fairqueue.queue.records import handler_limits as _handler_limits
    from fairqueue.queue.records import task_info as _task_info
    from fairqueue.queue.records import user_settings as _user_settings
    from fairqueue.queue.workers import _info
    from fairqueue.schedules.definition import read_definition
    from fairqueue.schedules.state import read_state
    from fairqueue.schedules.store import read_problem

    readers: tuple[Callable[[], object], ...] = (
        lambda: Task.from_document("t", data),
        lambda: read_run("t", data),
        lambda: read_definition("s", data).recurrence,
        lambda: _task_info("t", data, data, None),
        lambda: _user_settings(data, 0),
        lambda: _handler_limits(data),
        lambda: read_problem(b"s", data),
        lambda: read_state(data),
        lambda: _info(data, b"1"),
    )
    for read in readers:
        with suppress(FairQueueError):
            read()


def _signature(data: bytes) -> None:
    """Only the right secret is accepted."""
    from fairqueue.http_tasks.http import verify_signature

    assert not verify_signature("k", _text(data), b"body", now=NOW_MS / 1000)


if __name__ == "__main__":
    sys.exit(main())
