"""Install the wheel of dist/ into a fresh environment and use it from there.

Without arguments: create the environment, install, and run this file again inside it, from a folder
outside the checkout. Exits with a non-zero status at the first error.
"""

import logging
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
import venv
from importlib.resources import files
from pathlib import Path

DIST = Path(__file__).resolve().parent.parent / "dist"


def main() -> None:
    """Install the wheel with its embedded server, CLI and dashboard, and use it."""
    wheels = list(DIST.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{DIST} has {len(wheels)} wheels instead of one: run `make build`")
    with tempfile.TemporaryDirectory(prefix="wheel-smoke-") as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        python = str(Path(folder) / "venv" / "bin" / "python")
        install = ["-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
        subprocess.run([python, *install, f"{wheels[0]}[cli,embedded,web]"], check=True, cwd=folder)
        # -I: neither PYTHONPATH nor the folder of this file may lead to the checkout.
        program = [python, "-I", "-W", "error", __file__, "inside"]
        subprocess.run(program, check=True, cwd=folder, timeout=120)


def inside() -> None:
    """Use the installed package as a new user would."""
    check_that_importing_does_nothing()
    check_that_scripts_came_along()
    check_that_what_pages_load_came_along()
    use_it()
    look_at_the_dashboard()
    call_the_command()
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
    for group in ("task", "schedule", "lib"):
        scripts = [entry for entry in (folder / group).iterdir() if entry.name.endswith(".lua")]
        expect(bool(scripts), f"{folder / group} of the wheel has no .lua files")
    jobs = files("fairqueue") / "demo" / "jobs.toml"
    expect(jobs.is_file(), f"the wheel has no {jobs}")


def check_that_what_pages_load_came_along() -> None:
    """Third-party files are inside the installed package, each with its licence."""
    folder = files("fairqueue") / "web" / "dashboard" / "static"
    expect(folder.is_dir(), f"the wheel has no folder {folder}: was `make static` run?")
    names = {entry.name for entry in folder.iterdir()}
    for name in ("htmx", "inter", "pico", "uplot"):
        expect(f"{name}.LICENSE.txt" in names, f"the wheel has no licence of {name}")
        loaded = names & {f"{name}.{ending}" for ending in ("min.js", "min.css", "woff2")}
        expect(bool(loaded), f"the wheel has {name}'s licence, but not {name}")


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


def look_at_the_dashboard() -> None:
    """Load the first page, and all files that it needs, over HTTP."""
    from fairqueue import TaskQueue
    from fairqueue.web import WebServer, create_app

    with TaskQueue.embedded() as queue, WebServer(create_app(queue, auth=False)) as server:
        page = fetch(server.url + "/")
        expect("<h1>Overview</h1>" in page, f"the first page is {page[:200]!r}")
        loaded = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
        expect(len(loaded) >= 7, f"the first page loads only {loaded}")
        for path in loaded:
            expect(bool(fetch(server.url + path)), f"{path} is empty")


def fetch(url: str) -> str:
    """Return the content of a URL; exit with a message if the status is not 200."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode(errors="replace"))


def call_the_command() -> None:
    """The command is installed and prints its help."""
    command = Path(sys.executable).with_name("fairqueue")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60)
    expect(done.returncode == 0, f"`fairqueue --help` ended with {done.returncode}: {done.stderr}")
    expect("schedules" in done.stdout, f"`fairqueue --help` says {done.stdout[:200]!r}")


def signal_handlers() -> dict[int, object]:
    """Return the handler of each signal."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def expect(held: bool, otherwise: str) -> None:
    """Exit with a message unless the condition holds."""
    if not held:
        sys.exit(f"wheel smoke test: {otherwise}")


if __name__ == "__main__":
    if sys.argv[1:] == ["inside"]:
        inside()
    else:
        main()
