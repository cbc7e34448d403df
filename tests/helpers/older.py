"""Versions of FairQueue from before, which tests run in processes of their own.

`tests/data/fairqueue-<version>.tar.xz` is the package as a commit had it, with its scripts and
without its pages, commands and demo: "0.1.0" is 17df8d8, before queues had a layout number;
"0.1.0-flat" is 13cf035, the last one in which users of tenants waited in one order with all others.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from fairqueue.clock import ManualClock

DATA = Path(__file__).parents[1] / "data"
VERSIONS = ("0.1.0", "0.1.0-flat")  # the oldest first

# An editable installation of the present version must not lend the old one its modules.
_ALONE = """\
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
import fairqueue
assert fairqueue.__file__.startswith(sys.argv[1]), fairqueue.__file__
del sys.argv[1]
"""

# Evaluates one expression after the other, each at the time that comes with it.
_SERVE = """\
import json, logging
import redis
from fairqueue import Task, TaskQueue, TaskScheduler
from fairqueue.clock import ManualClock
logging.disable(logging.CRITICAL)
clock = ManualClock(0)
queue = TaskQueue(redis.Redis.from_url(sys.argv[1]), clock=clock)
link = queue.link if hasattr(queue, "link") else queue.connection
scheduler = TaskScheduler(queue, "old")
claims = {}

def claim(limit=1, lease=30.0, **options):
    found = queue.claim("old", limit, lease, **options)
    claims.update({each.task.task_id: each for each in found})
    return [each.task.task_id for each in found]

def finish(task_id):
    return queue.finish_many([(claims[task_id], None)])[0]

for line in sys.stdin:
    at_ms, code = json.loads(line)
    clock.set(at_ms / 1000)
    try:
        answer = {"value": eval(code)}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer, default=str), flush=True)
"""


class Refused(Exception):
    """An older version raised an error: its kind and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class OlderVersion:
    """A version of FairQueue, unpacked into a folder."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version, self.folder = version, folder / version
        with tarfile.open(DATA / f"fairqueue-{version}.tar.xz") as archive:
            archive.extractall(self.folder, filter="data")

    def start(self, code: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start a process that runs code with this version; `sys.argv` has the arguments."""
        paths = [str(self.folder), str(Path(__file__).parents[1])]
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _ALONE + code, str(self.folder), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *arguments: str) -> Any:
        """Run code with this version, and return what it prints, which is JSON."""
        process = self.start(code, *arguments)
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return json.loads(said) if said.strip() else None


class OlderProcess:
    """A process of an older version that uses a queue, at the time of a clock.

    `do` evaluates an expression in it. The names are `queue`, `scheduler`, `link`, `Task`, `claim`,
    which returns ids, `claims`, which has the claims by id, and `finish`, which takes an id.
    """

    def __init__(self, version: OlderVersion, url: str, clock: ManualClock) -> None:
        self._clock = clock
        self._process = version.start(_SERVE, url)

    def do(self, code: str) -> Any:
        """Evaluate an expression. Raises Refused if it raises an error of FairQueue."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([self._clock.now_ms(), code]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._process.stderr and self._process.stderr.read()
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"], answer["text"])
        return answer["value"]

    def close(self) -> None:
        self._process.communicate(timeout=60)
