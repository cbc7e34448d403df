"""The command line: what `python -m fairqueue COMMAND` does, prints, and exits with."""

import argparse
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from fairqueue.daemon import OUTAGE, OVERRUNS, Daemon, Totals, run_once, term_for
from fairqueue.errors import (
    ConfigurationError,
    EmbeddedServerError,
    FairQueueError,
    InvalidInput,
    RedisRefused,
    RedisUnavailable,
)
from fairqueue.models import Problem, ScheduledTask
from fairqueue.queue import TaskQueue
from fairqueue.scheduler import TaskScheduler
from fairqueue.schedules import MAX_LISTED
from fairqueue.validation import check_count

# Exit codes, the same for every command; docs/scheduler-service.md lists them. Usage errors that
# argparse finds are 2 as well.
OK, FAILED, USAGE, NO_REDIS, UNHEALTHY, INTERRUPTED = 0, 1, 2, 3, 6, 130

URL_VARIABLE = "FAIRQUEUE_URL"
DEFAULT_URL = "redis://localhost:6379/0"
USUAL_INTERVAL_S = 1.0
USUAL_LIMIT, MOST_LISTED = 100, 100_000  # schedules in one table, which is put together in memory
LOG_LEVELS = ("debug", "info", "warning", "error")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


# --- what all commands share ----------------------------------------------------------------------


@contextmanager
def open_scheduler(
    options: argparse.Namespace, interval: float = USUAL_INTERVAL_S, lock_timeout: float = 10.0
) -> Iterator[TaskScheduler]:
    """The scheduler on the queue that the options name; Redis has answered.

    Raises ConfigurationError, RedisUnavailable or EmbeddedServerError.
    """
    if options.embedded is not None:
        if not os.path.isdir(options.embedded):
            # The library would make it; here, a new and empty one can only be a slip.
            raise ConfigurationError(
                f"--embedded {options.embedded!r} is no folder: the one that TaskQueue.embedded "
                "was given"
            )
        queue = TaskQueue.embedded(options.embedded, options.queue)
    else:
        url = options.url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        queue = TaskQueue.from_url(url, options.queue)
    with queue:
        try:
            scheduler = TaskScheduler(queue, check_interval=interval, lock_timeout=lock_timeout)
        except RedisRefused as error:
            # A password or a permission: not the trouble of one pass.
            raise ConfigurationError(str(error)) from error
        yield scheduler


def say(text: str) -> None:
    """Print a line of data, if anybody reads it."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The exit code still says what happened. Python would complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_words(counts: Mapping[str, float]) -> str:
    """Numbers with their names, for people."""
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())


@contextmanager
def ended_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `stop`; a second one ends the process at once."""

    def handle(number: int, frame: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        stop()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- scheduler ------------------------------------------------------------------------------------


def add_scheduler(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command `scheduler`."""
    parser = commands.add_parser(
        "scheduler",
        help="fire schedules when they are due",
        description="Fire schedules until SIGINT or SIGTERM, or with --once what is due now.",
    )
    add_common(parser)
    parser.add_argument("--once", action="store_true", help="fire what is due and end, for cron")
    parser.add_argument("--json", action="store_true", help="print what happened as JSON")
    daemon = parser.add_argument_group("not with --once")
    daemon.add_argument(
        "--interval",
        type=float,
        metavar="SECONDS",
        help=f"look at least so often; default {USUAL_INTERVAL_S:g}",
    )
    daemon.add_argument(
        "--lock-timeout",
        type=float,
        metavar="SECONDS",
        help="another instance takes over so long after this one was killed; "
        "default 10, or three intervals if that is more",
    )
    daemon.add_argument(
        "--max-overruns",
        type=int,
        metavar="N",
        help=f"end with exit code {UNHEALTHY} after so many passes in a row that took longer than "
        "the interval",
    )
    daemon.add_argument(
        "--exit-on-outage",
        action="store_true",
        default=None,
        help=f"end with exit code {NO_REDIS} when Redis goes away; default: wait until it is back",
    )
    parser.set_defaults(run=run_scheduler, usual_level="info")


def run_scheduler(options: argparse.Namespace) -> int:
    """Fire schedules; the exit code."""
    return fire_once(options) if options.once else fire_forever(options)


def fire_once(options: argparse.Namespace) -> int:
    """Fire what is due, and say what happened."""
    for name in ("interval", "lock_timeout", "max_overruns", "exit_on_outage"):
        if getattr(options, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} makes no sense with --once")
    asked: list[bool] = []
    with open_scheduler(options) as scheduler, ended_by_signals(lambda: asked.append(True)):
        totals = run_once(scheduler, lambda: bool(asked))
        leader = None
        if totals.passes and not totals.is_leader:
            leader = scheduler.health().leader or "another instance"
    say(outcome_json(totals, leader) if options.json else outcome_line(totals, leader))
    return FAILED if totals.failed else OK


def outcome_line(totals: Totals, leader: str | None) -> str:
    """What a run of --once did, for people."""
    line = in_words(totals.as_dict())
    return line if leader is None else f"{line}; {leader} leads, and fires what is due"


def outcome_json(totals: Totals, leader: str | None) -> str:
    """The same for machines; `leader` is who else leads, or null."""
    return json.dumps({**totals.as_dict(), "failed": totals.failed, "leader": leader})


def fire_forever(options: argparse.Namespace) -> int:
    """Fire schedules until the end, and print statistics."""
    interval = USUAL_INTERVAL_S if options.interval is None else options.interval
    term = term_for(interval, options.lock_timeout)
    with open_scheduler(options, interval, term) as scheduler:
        daemon = Daemon(
            scheduler,
            interval=interval,
            max_overruns=options.max_overruns,
            exit_on_outage=bool(options.exit_on_outage),
        )
        with ended_by_signals(daemon.stop):
            end = daemon.run()
        statistics = daemon.statistics()
    say(json.dumps({"end": end, **statistics}) if options.json else in_words(statistics))
    if end == OVERRUNS:
        complain(
            f"{options.max_overruns} passes in a row took longer than the interval of {interval:g} "
            "seconds: raise --interval, or look why Redis is slow"
        )
    return {OVERRUNS: UNHEALTHY, OUTAGE: NO_REDIS}.get(end, OK)


# --- schedules ------------------------------------------------------------------------------------


def add_schedules(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command `schedules`."""
    parser = commands.add_parser(
        "schedules",
        help="show what is configured",
        description="Show schedules, ordered by user and id. Times are UTC.",
    )
    add_common(parser)
    parser.add_argument("--user", help="of this user only")
    parser.add_argument("--json", action="store_true", help="print JSON, with all fields")
    parser.add_argument(
        "--limit", type=int, default=USUAL_LIMIT, help="at most so many; default %(default)s"
    )
    parser.set_defaults(run=run_schedules, usual_level="warning")


def run_schedules(options: argparse.Namespace) -> int:
    """Print the schedules; the exit code."""
    check_count(options.limit, "--limit", ConfigurationError, least=1, most=MOST_LISTED)
    with open_scheduler(options) as scheduler:
        found, has_more = read_schedules(scheduler, options.user, options.limit)
        # A problem does not say whose it is, so one user is not shown those of all.
        problems = [] if options.user is not None else scheduler.problems()[: options.limit]
    if options.json:
        say(schedules_json(found, problems, has_more))
        return OK
    for line in table([HEADINGS, *map(row, found)]):
        say(line)
    for problem in problems:
        say(printable(f"set aside: {problem.schedule_id}: {problem.reason}"))
    if has_more:
        complain(f"there are more than {options.limit}: raise --limit, or give --user")
    return OK


def read_schedules(
    scheduler: TaskScheduler, user: str | None, limit: int
) -> tuple[list[ScheduledTask], bool]:
    """At most so many schedules, page by page, and whether there are more."""
    found: list[ScheduledTask] = []
    cursor = None
    while len(found) <= limit:
        # One more than is wanted tells whether there are more.
        want = min(limit + 1 - len(found), MAX_LISTED)
        page = scheduler.list_schedules(user, limit=want, cursor=cursor)
        found += page
        cursor = page.cursor
        if cursor is None:
            break
    return found[:limit], len(found) > limit


HEADINGS = ("ID", "USER", "NAME", "CRON", "ZONE", "STATE", "NEXT RUN", "LAST RUN")


def row(schedule: ScheduledTask) -> tuple[str, ...]:
    """A schedule as a line of the table."""
    return (
        schedule.schedule_id,
        schedule.user_id,
        schedule.name,
        schedule.rule,
        schedule.timezone,
        state_of(schedule),
        moment_text(schedule.next_run),
        moment_text(schedule.last_run),
    )


def state_of(schedule: ScheduledTask) -> str:
    """In a word: active, completed, disabled by the scheduler, paused, or inactive."""
    if schedule.is_active:
        return "active"
    if schedule.disabled_reason:
        return "completed" if schedule.disabled_reason.startswith("completed") else "disabled"
    return "inactive" if schedule.paused_at is None else "paused"


def moment_text(moment: datetime | None) -> str:
    """A moment for people, to the second."""
    return "-" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines in which columns stand below each other."""
    cells = [[printable(cell) for cell in each] for each in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for each in cells:
        padded = (cell.ljust(width) for cell, width in zip(each, widths, strict=True))
        yield "  ".join(padded).rstrip()


def printable(text: str) -> str:
    """The text on one line, unable to tell the terminal anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def schedules_json(
    found: Sequence[ScheduledTask], problems: Sequence[Problem], has_more: bool
) -> str:
    """All fields of the schedules, without payload and metadata: these may hold secrets."""
    schedules = [
        {
            "schedule_id": each.schedule_id,
            "user_id": each.user_id,
            "name": each.name,
            "cron_expr": each.cron_expr,
            "timezone": each.timezone,
            "priority": int(each.priority),
            "overlap": each.overlap,
            "state": state_of(each),
            "disabled_reason": each.disabled_reason,
            "next_run": each.next_run,
            "last_run": each.last_run,
            "run_count": each.run_count,
            "missed_count": each.missed_count,
            "skipped_count": each.skipped_count,
            "created_at": each.created_at,
            "updated_at": each.updated_at,
        }
        for each in found
    ]
    set_aside = [
        {"schedule_id": each.schedule_id, "reason": each.reason, "since": each.since}
        for each in problems
    ]
    document = {"schedules": schedules, "has_more": has_more, "set_aside": set_aside}
    return json.dumps(document, default=datetime.isoformat)


# --- logging --------------------------------------------------------------------------------------

_USUAL_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was passed to the logger as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _USUAL_ATTRIBUTES}


def time_of(record: logging.LogRecord) -> str:
    """When it was logged, UTC."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class TextFormatter(logging.Formatter):
    """A line for people: time, level, logger, event, fields."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows it."""
        fields = fields_of(record)
        if fields.get("event") == record.message:
            del fields["event"]
        words = [time_of(record), record.levelname, record.name, printable(record.message)]
        return " ".join(words + [f"{name}={_value(value)}" for name, value in fields.items()])


def _value(value: object) -> str:
    """A value without spaces and control characters, or quoted."""
    text = str(value)
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """A JSON object on a line of its own, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str, style: str) -> None:
    """Send what the library logs to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


# --- the program ----------------------------------------------------------------------------------


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of all commands."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", help=f"the Redis; default ${URL_VARIABLE} (no password in ps), or {DEFAULT_URL}"
    )
    where.add_argument(
        "--embedded", metavar="PATH", help="the data folder of an embedded server instead"
    )
    parser.add_argument("--queue", default="default", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, help="default: info for a daemon, else warning"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")


def make_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(
        "python -m fairqueue", description="Schedules and a fair queue on Redis."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_scheduler(commands)
    add_schedules(commands)
    return parser


def complain(text: str) -> None:
    """Say something that is no data."""
    sys.stderr.write(f"fairqueue: {printable(text)}\n")


def exit_code(error: FairQueueError) -> int:
    """What an error means for whoever started us."""
    if isinstance(error, InvalidInput):
        return USAGE
    if isinstance(error, RedisUnavailable | EmbeddedServerError):
        return NO_REDIS
    return FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    options = make_parser().parse_args(arguments)
    once = getattr(options, "once", False)
    configure_logging(
        options.log_level or ("warning" if once else options.usual_level), options.log_format
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may be in any script
    try:
        return int(options.run(options))
    except FairQueueError as error:
        complain(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
