"""What all commands share: where the queue is, who acts, how to ask before something is lost."""

import functools
import getpass
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import click

from fairqueue.access.credentials import Actor
from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.logs import FORMATS, LEVELS, configure_logging
from fairqueue.cli.output import note
from fairqueue.errors import ConfigurationError, RedisRefused
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.processes import LOOK_UP_S

URL_VARIABLE = "FAIRQUEUE_URL"
DEFAULT_URL = "redis://localhost:6379/0"
CHECK_S = 2.0  # so long the first question to Redis waits: a wrong address is told soon
OUTPUTS = ("table", "json", "jsonl")
SIGNALS = (signal.SIGINT, signal.SIGTERM)

F = TypeVar("F", bound=Callable[..., Any])


class Session:
    """One run of the program: what its options say, wherever they stand."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.embedded: str | None = None
        self.queue = "default"
        self.log_level: str | None = None
        self.log_format = "text"
        self.output = "table"

    @property
    def is_table(self) -> bool:
        """Whether people read what is printed."""
        return self.output == "table"

    def begin(self, usual_level: str) -> None:
        """Configure logging: as asked for, or at the level that is usual for the command."""
        configure_logging(self.log_level or usual_level, self.log_format)

    @property
    def named_url(self) -> str | None:
        """The URL of Redis, if one is named."""
        return self.url or os.environ.get(URL_VARIABLE) or None

    def check(self) -> None:
        """Raises ConfigurationError if the options contradict each other."""
        if self.embedded is None:
            return
        if self.url is not None:
            raise ConfigurationError(
                f"--url is not allowed with --embedded {self.embedded!r}: give one of them"
            )

    @contextmanager
    def open(self, *, check: bool = True) -> Iterator[TaskQueue]:
        """The queue that the options name; with `check`, Redis has answered.

        Raises ConfigurationError, RedisUnavailable or EmbeddedServerError.
        """
        self.check()
        with self._queue() as queue:
            if check:
                check_redis(queue)
            yield queue

    def _queue(self) -> TaskQueue:
        if self.embedded is None:
            return TaskQueue.from_url(self.named_url or DEFAULT_URL, self.queue)
        parent = os.path.dirname(os.path.abspath(self.embedded))
        if not os.path.isdir(parent):
            raise ConfigurationError(
                f"--embedded {self.embedded!r} cannot be made: there is no folder {parent!r}"
            )
        if not os.path.exists(self.embedded):
            note(f"--embedded {self.embedded!r} is a new folder, with an empty queue")
        elif not os.path.isdir(self.embedded):
            raise ConfigurationError(f"--embedded {self.embedded!r} must be a folder, not a file")
        return TaskQueue.embedded(self.embedded, self.queue)

    @contextmanager
    def inspector(self) -> Iterator[Inspector]:
        """All that can be seen and done, as the user of this machine. Raises as `open`."""
        with self.open() as queue:
            yield Inspector(queue, actor())


def check_redis(queue: TaskQueue) -> None:
    """See that Redis is there. Raises RedisUnavailable, or ConfigurationError if it lets us not."""
    try:
        queue.check(timeout=CHECK_S)
    except RedisRefused as error:
        # A password or a permission: asking again does not help.
        raise ConfigurationError(str(error)) from error


def actor() -> Actor:
    """Who acts: the user of the machine, who has the keys of Redis and may do all."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = str(os.getuid())  # in a container it may have no name
    return Actor(name=f"{user}@{socket.gethostname()}", role="admin", via="cli")


_pass_session = click.make_pass_decorator(Session, ensure=True)


def pass_session(command: F) -> F:
    """The command gets the session first."""
    return cast(F, _pass_session(command))


# --- options that stand before or after a command -------------------------------------------------


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        setattr(ctx.ensure_object(Session), str(param.name), value)


def _shared(*names: str, **settings: Any) -> click.Option:
    return click.Option(names, expose_value=False, callback=_keep, default=None, **settings)


def shared_options() -> list[click.Parameter]:
    """The options of all commands and groups."""
    return [
        _shared(
            "--url",
            metavar="URL",
            help=f"The Redis, also redis+sentinel://HOST:PORT,.../SERVICE; default ${URL_VARIABLE} "
            f"(no password in ps), or {DEFAULT_URL}.",
        ),
        _shared(
            "--embedded", metavar="PATH", help="The data folder of an embedded server instead."
        ),
        _shared("--queue", metavar="NAME", help="Default: default."),
        _shared(
            "--log-level",
            type=click.Choice(LEVELS),
            help="Default: info for what goes on until it is stopped, else warning.",
        ),
        _shared("--log-format", type=click.Choice(FORMATS), help="Default: text."),
    ]


_SHARED_NAMES = {name for option in shared_options() for name in option.opts}


class Command(click.Command):
    """A command with the shared options."""

    def __init__(self, *args: Any, usual_level: str = "warning", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.usual_level = usual_level
        self.params += shared_options()

    def invoke(self, ctx: click.Context) -> Any:
        """Run it, with logging configured."""
        once = bool(ctx.params.get("once"))
        ctx.ensure_object(Session).begin("warning" if once else self.usual_level)
        return super().invoke(ctx)


class Group(click.Group):
    """A group of commands, with the shared options; `default` is the one that is meant by none."""

    command_class = Command
    group_class = type

    def __init__(self, *args: Any, default: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._default = default
        self.params += shared_options()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command where one should be."""
        if self._default is not None:
            place = _after_shared(args)
            rest = args[place:]
            if not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help")):
                args = [*args[:place], self._default, *rest]
        return super().parse_args(ctx, args)


def _after_shared(args: Sequence[str]) -> int:
    """Where the shared options at the beginning end."""
    place = 0
    while place < len(args):
        name, equals, _ = args[place].partition("=")
        if name not in _SHARED_NAMES:
            break
        place += 1 if equals else 2
    return min(place, len(args))


# --- what some commands share ---------------------------------------------------------------------


def reading(command: F) -> F:
    """`-o table|json|jsonl`, and `--json` for short."""

    def keep_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Session).output = "json"

    command = click.option(
        "--json", is_flag=True, expose_value=False, callback=keep_json, help="The same as -o json."
    )(command)
    return click.option(
        "-o",
        "--output",
        type=click.Choice(OUTPUTS),
        default=None,
        expose_value=False,
        callback=_keep,
        help="How data is printed; default: table.",
    )(command)


class Consent:
    """Whether something that cannot be taken back is to be done."""

    def __init__(self, dry_run: bool, yes: bool) -> None:
        self.dry_run = dry_run
        self._yes = yes

    def to(self, what: str) -> bool:
        """True if it is to be done; False in a dry run, which says what would be.

        Asks on a terminal. Raises UsageError without one, and ends the program if the answer is no.
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
    """`--dry-run` and `--yes`; the command gets both as `consent`."""

    @click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
    @click.option("-y", "--yes", is_flag=True, help="Do not ask.")
    @functools.wraps(command)
    def asking(*args: Any, dry_run: bool, yes: bool, **settings: Any) -> Any:
        return command(*args, consent=Consent(dry_run, yes), **settings)

    return asking


@contextmanager
def ended_by_signals(stop: Callable[[], object]) -> Iterator[None]:
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


def until_signalled(is_alive: Callable[[], bool], announce: Callable[[], object]) -> bool:
    """Announce what is served, and return at SIGINT or SIGTERM: True.

    A second signal ends the process at once. False when what is served is not alive any more.
    """
    awake, waker = socket.socketpair()
    # No Event: its lock may be held by the wait that the handler interrupts.
    with awake, waker, ended_by_signals(lambda: waker.send(b"x")):
        # Handlers run in this thread, and a signal that another thread was given does not wake it.
        awake.settimeout(LOOK_UP_S)
        announce()  # not before: a signal to what was announced must find its handler
        said = b""
        while not said and is_alive():
            with suppress(TimeoutError):
                said = awake.recv(1)
        return bool(said)
