"""Commands in processes of their own."""

import subprocess
import sys
from collections.abc import Callable

PROGRAM = (sys.executable, "-W", "error", "-m", "fairqueue")
DEADLINE = 60  # seconds until a process must have done its work

Start = Callable[..., "subprocess.Popen[str]"]  # the type of the fixture `start`


def line_of(process: "subprocess.Popen[str]", part: str, *, err: bool = False) -> str:
    """Read the output of a process up to a line that contains `part`; return that line."""
    stream = process.stderr if err else process.stdout
    assert stream is not None
    seen = []
    for line in stream:
        if part in line:
            return line
        seen.append(line)
    raise AssertionError(f"it ended with {process.wait(DEADLINE)} and without {part!r}: {seen}")


def result_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for the end; return the exit code and the output that was not read yet."""
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err
