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
