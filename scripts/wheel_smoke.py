"""Install the wheel of dist/ into a fresh environment and use it from there.

Without arguments: make the environment, install, and run this file again inside it, from a folder
that has nothing to do with the checkout. Ends with a status other than 0 at the first thing wrong.
"""

import logging
import signal
import subprocess
import sys
import tempfile
import threading
import venv
from importlib.resources import files
from pathlib import Path

DIST = Path(__file__).resolve().parent.parent / "dist"


def main() -> None:
    """Install the one wheel with its embedded server, and use it."""
    wheels = list(DIST.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{DIST} has {len(wheels)} wheels instead of one: run `make build`")
    with tempfile.TemporaryDirectory(prefix="wheel-smoke-") as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        python = str(Path(folder) / "venv" / "bin" / "python")
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([python, *install, f"{wheels[0]}[embedded]"], check=True, cwd=folder)
        # -I: neither PYTHONPATH nor the folder of this file can lend us the checkout.
        program = [python, "-I", "-W", "error", __file__, "inside"]
        subprocess.run(program, check=True, cwd=folder, timeout=120)


def inside() -> None:
    """What a user does first, on what the wheel brought."""
    check_that_importing_does_nothing()
    check_that_scripts_came_along()
    use_it()
    print("wheel works")


def check_that_importing_does_nothing() -> None:
    """Importing starts no thread, installs no signal handler and configures no logging."""
    threads, handlers = threading.enumerate(), signal_handlers()

    import fairqueue

    found = Path(str(fairqueue.__file__))
    expect(found.is_relative_to(sys.prefix), f"fairqueue was imported from {found}, not the wheel")
    expect(threading.enumerate() == threads, "importing fairqueue started a thread")
    expect(signal_handlers() == handlers, "importing fairqueue installed a signal handler")
    expect(not logging.getLogger().handlers, "importing fairqueue configured the root logger")


def check_that_scripts_came_along() -> None:
    """The Lua scripts are inside the installed package."""
    folder = files("fairqueue") / "lua"
    expect(folder.is_dir(), f"the wheel has no folder {folder}")
    scripts = [entry.name for entry in folder.iterdir() if entry.name.endswith(".lua")]
    expect(bool(scripts), f"{folder} of the wheel has no .lua files")


def use_it() -> None:
    """One task and one schedule, on the embedded server."""
    from fairqueue import Task, TaskQueue, TaskScheduler

    with TaskQueue.embedded() as queue:
        task_id = queue.push(Task.create(user_id="alice", payload={"n": 1}))
        (claim,) = queue.claim("smoke", limit=1)
        expect(claim.task.payload == {"n": 1}, f"claimed {claim.task} instead of {task_id}")
        queue.finish(claim)
        expect(queue.claim("smoke", limit=1) == [], "a finished task was offered again")

        scheduler = TaskScheduler(queue)
        schedule_id = scheduler.add_schedule(cron_expr="* * * * *", user_id="alice")
        scheduler.tick()
        expect(scheduler.get_schedule(schedule_id) is not None, "the schedule is not there")


def signal_handlers() -> dict[int, object]:
    """What each signal does now."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def expect(held: bool, otherwise: str) -> None:
    """End with a message unless it held."""
    if not held:
        sys.exit(f"wheel smoke test: {otherwise}")


if __name__ == "__main__":
    if sys.argv[1:] == ["inside"]:
        inside()
    else:
        main()
