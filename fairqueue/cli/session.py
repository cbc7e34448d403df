"""What all commands share: the session, the options of every command, consent, and signals."""

import functools
import getpass
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import click

from fairqueue.access.credentials import Actor
from fairqueue.cli.exit_codes import FAILED, NO_REDIS
from fairqueue.cli.logs import FORMATS, LEVELS, configure_logging
from fairqueue.cli.output import note
from fairqueue.errors import ConfigurationError, RedisRefused, RedisUnavailable, shown
from fairqueue.inspection import Inspector
from fairqueue.inspection.missing import missing_text, note_missing
from fairqueue.link.connection import Link
from fairqueue.link.keys import MOST_PARTITIONS
from fairqueue.queue.opening import open_embedded, open_queue
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.processes import LOOK_UP_S

URL_VARIABLE = "FAIRQUEUE_URL"
PARTITIONS_VARIABLE = "FAIRQUEUE_PARTITIONS"
DEFAULT_URL = "redis://localhost:6379/0"
CHECK_S = 2.0  # how long the first question to Redis waits, so a wrong address is reported soon
OUTPUTS = ("table", "json", "jsonl")
SIGNALS = (signal.SIGINT, signal.SIGTERM)

F = TypeVar("F", bound=Callable[..., Any])


class Session:
    """One run of the program: the values of the shared options, and the queue that they name."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.embedded: str | None = None
        self.queue = "default"
        self.partitions: int | None = None
        self.log_level: str | None = None
        self.log_format = "text"
        self.output = "table"
        self._link: Link | None = None  # of the queue that was opened

    @property
    def is_table(self) -> bool:
        """Whether to print for people, not as JSON."""
        return self.output == "table"

    def begin(self, default_level: str) -> None:
        """Configure logging, at the command's default level unless another was given."""
        configure_logging(self.log_level or default_level, self.log_format)

    @property
    def named_url(self) -> str | None:
        """The URL of Redis from the option or the environment, if any."""
        return self.url or os.environ.get(URL_VARIABLE) or None

    @property
    def named_partitions(self) -> int | None:
        """The number of partitions from the option or the environment, if any.

        Raises ConfigurationError if the variable is not such a number.
        """
        text = os.environ.get(PARTITIONS_VARIABLE)
        if self.partitions is not None or not text:
            return self.partitions
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MOST_PARTITIONS:
            raise ConfigurationError(
                f"${PARTITIONS_VARIABLE} must be 1 to {MOST_PARTITIONS}, not {shown(text)}"
            )
        return int(text)

    def check(self) -> None:
        """Raises ConfigurationError if the options contradict each other."""
        if self.embedded is not None and self.url is not None:
            raise ConfigurationError(
                f"--url and --embedded {self.embedded!r} cannot be used together: give one of them"
            )

    @contextmanager
    def open(self, *, check: bool = True) -> Iterator[TaskQueue]:
        """The queue that the options name. With `check`, Redis has answered.

        Raises ConfigurationError, RedisUnavailable or EmbeddedServerError.
        """
        self.check()
        with self._queue(check) as queue:
            self._link = queue.link
            if check:
                check_redis(queue)
            yield queue

    def _queue(self, check: bool) -> TaskQueue:
        partitions = self.named_partitions
        if self.embedded is None:
            url = self.named_url or DEFAULT_URL
            with _refused_for_good():
                return open_queue(
                    url, self.queue, partitions=partitions, timeout=CHECK_S, patient=not check
                )
        parent = os.path.dirname(os.path.abspath(self.embedded))
        if not os.path.isdir(parent):
            raise ConfigurationError(
                f"--embedded {self.embedded!r} cannot be created: folder {parent!r} does not exist"
            )
        if not os.path.exists(self.embedded):
            note(f"--embedded {self.embedded!r} is a new folder with an empty queue")
        elif not os.path.isdir(self.embedded):
            raise ConfigurationError(f"--embedded {self.embedded!r} must be a folder, not a file")
        return open_embedded(self.embedded, self.queue, partitions=partitions)

    def warn_missing(self, missing: Mapping[int, str]) -> None:
        """Print which partitions did not answer, if any, with the reason of the first."""
        if missing and self._link is not None:
            note(f"{missing_text(self._link, missing)} The reason: {next(iter(missing.values()))}")

    @functools.cached_property
    def inspector(self) -> Inspector:
        """The inspector of the queue, acting as the user of this machine. Raises as `open`.

        The queue is closed when the command ends.
        """
        queue = click.get_current_context().with_resource(self.open())
        return Inspector(queue, actor())


def check_redis(queue: TaskQueue) -> None:
    """Check that Redis answers. Raises RedisUnavailable, or ConfigurationError if it refuses us.

    A part of a queue with partitions may be away: what is done with the others goes on.
    """
    with _refused_for_good():
        try:
            queue.check(timeout=CHECK_S)
        except RedisUnavailable:
            if queue.partitions == 1:
                raise


@contextmanager
def _refused_for_good() -> Iterator[None]:
    """Raises ConfigurationError if Redis refuses us: asking again does not help.

    That is a wrong password or a missing permission.
    """
    try:
        yield
    except RedisRefused as error:
        raise ConfigurationError(str(error)) from error


def actor() -> Actor:
    """The user of this machine. Anyone who can reach Redis directly is an admin."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = str(os.getuid())  # in a container the user may have no name
    return Actor(name=f"{user}@{socket.gethostname()}", role="admin", via="cli")


_pass_session = click.make_pass_decorator(Session, ensure=True)


def pass_session(command: F) -> F:
    """Pass the session as the first argument."""
    return cast(F, _pass_session(command))


# --- shared options, before or after the command --------------------------------------------------


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        setattr(ctx.ensure_object(Session), str(param.name), value)


def _shared(*names: str, **settings: Any) -> click.Option:
    return click.Option(names, expose_value=False, callback=_keep, default=None, **settings)


def shared_options() -> list[click.Parameter]:
    """The options of every command and group."""
    return [
        _shared(
            "--url",
            metavar="URL",
            help="URL of Redis, redis+sentinel://HOST:PORT,.../SERVICE, or "
            f"redis+cluster://HOST:PORT,...; default: ${URL_VARIABLE} (keeps passwords out of ps), "
            f"or {DEFAULT_URL}.",
        ),
        _shared("--embedded", metavar="PATH", help="Use an embedded server with this data folder."),
        _shared("--queue", metavar="NAME", help="Name of the queue; default: default."),
        _shared(
            "--partitions",
            type=click.IntRange(1, MOST_PARTITIONS),
            help="Partitions of a new queue, or those that it must have; default: "
            f"${PARTITIONS_VARIABLE}, or as many as it has.",
        ),
        _shared(
            "--log-level",
            type=click.Choice(LEVELS),
            help="Default: info for long-running commands, otherwise warning.",
        ),
        _shared("--log-format", type=click.Choice(FORMATS), help="Default: text."),
    ]


_SHARED_NAMES = {name for option in shared_options() for name in option.opts}


class Command(click.Command):
    """A command with the shared options."""

    def __init__(self, *args: Any, default_level: str = "warning", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.default_level = default_level
        self.params += shared_options()

    def invoke(self, ctx: click.Context) -> Any:
        """Configure logging and run the command.

        One that reads goes on without partitions that do not answer: it prints what there is, a
        warning, and ends with NO_REDIS unless it has another code.
        """
        once = bool(ctx.params.get("once"))
        session = ctx.ensure_object(Session)
        session.begin("warning" if once else self.default_level)
        with note_missing() as missing:
            code = super().invoke(ctx)
        session.warn_missing(missing.partitions)
        return NO_REDIS if missing and not code else code


class Group(click.Group):
    """A group of commands with the shared options. `default` runs if no command is named."""

    command_class = Command
    group_class = type

    def __init__(self, *args: Any, default: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._default = default
        self.params += shared_options()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command if none is named."""
        if self._default is not None:
            place = _after_shared(args)
            rest = args[place:]
            if not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help")):
                args = [*args[:place], self._default, *rest]
        return super().parse_args(ctx, args)


def _after_shared(args: Sequence[str]) -> int:
    """The position after the shared options at the beginning."""
    place = 0
    while place < len(args):
        name, equals, _ = args[place].partition("=")
        if name not in _SHARED_NAMES:
            break
        place += 1 if equals else 2
    return min(place, len(args))


# --- what some commands share ---------------------------------------------------------------------


def options(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Combine decorators such as `click.option(...)` into one, in the order of the help text."""

    def add(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


def _keep_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).output = "json"


def prints_data(command: F) -> F:
    """Add `-o table|json|jsonl` and `--json`, and pass the session as the first argument."""
    add = options(
        click.option(
            "-o",
            "--output",
            type=click.Choice(OUTPUTS),
            default=None,
            expose_value=False,
            callback=_keep,
            help="Output format; default: table.",
        ),
        click.option(
            "--json", is_flag=True, expose_value=False, callback=_keep_json, help="Same as -o json."
        ),
    )
    return add(pass_session(command))


class Consent:
    """Whether to do something that cannot be undone."""

    def __init__(self, dry_run: bool, yes: bool) -> None:
        self.dry_run = dry_run
        self._yes = yes

    def to(self, what: str) -> bool:
        """Return True to go ahead, False in a dry run, which prints what would be done.

        Asks on a terminal and ends the program if the answer is no. Raises UsageError if there is
        no terminal.
        """
        if self.dry_run:
            note(f"dry run: would {what}")
            return False
        if self._yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise click.UsageError(
                f"to {what}, give --yes: there is no terminal to ask on; --dry-run changes nothing"
            )
        if not click.confirm(f"{what[0].upper()}{what[1:]}?", err=True):
            note("nothing was changed")
            raise click.exceptions.Exit(FAILED)
        return True


def destructive(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--dry-run` and `--yes`, passed to the command as `consent`."""

    @click.option("--dry-run", is_flag=True, help="Print what would be done, but change nothing.")
    @click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
    @functools.wraps(command)
    def asking(*args: Any, dry_run: bool, yes: bool, **settings: Any) -> Any:
        return command(*args, consent=Consent(dry_run, yes), **settings)

    return asking


@contextmanager
def ended_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at SIGINT or SIGTERM; a second signal ends the process at once."""

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


def until_signalled(is_alive: Callable[[], bool], announce: Callable[[], object]) -> bool:
    """Call `announce`, and wait for SIGINT or SIGTERM.

    Returns True at the signal, and False as soon as `is_alive` returns False. A second signal ends
    the process at once.
    """
    awake, waker = socket.socketpair()
    # Not an Event: its lock may be held by the wait that the signal handler interrupts.
    with awake, waker, ended_by_signals(lambda: waker.send(b"x")):
        # Handlers run in this thread; a signal delivered to another thread does not wake it.
        awake.settimeout(LOOK_UP_S)
        announce()  # only now: a signal sent after the announcement must find its handler
        said = b""
        while not said and is_alive():
            with suppress(TimeoutError):
                said = awake.recv(1)
        return bool(said)
