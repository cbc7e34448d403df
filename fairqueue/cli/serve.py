"""Everything in one command: `up`, `demo` and `dashboard`."""

from typing import Any

import click

from fairqueue.access.credentials import AccessStore
from fairqueue.alerts import Alerts
from fairqueue.cli.alert_options import alerting
from fairqueue.cli.apps import check_app, load_worker
from fairqueue.cli.exit_codes import FAILED, OK
from fairqueue.cli.metrics_options import Metering, metered
from fairqueue.cli.output import note, say
from fairqueue.cli.session import Command, F, Session, actor, pass_session, until_signalled
from fairqueue.cli.values import DURATION
from fairqueue.errors import ConfigurationError

USUAL_PORT = 8844


def served(command: F) -> F:
    """`--host` and `--port` of the dashboard."""
    command = click.option("--port", type=int, default=USUAL_PORT, show_default=True)(command)
    return click.option("--host", default="127.0.0.1", show_default=True)(command)


def run_options(command: F) -> F:
    """Options of `up` and `demo`."""
    command = click.option("--open", "open_browser", is_flag=True, help="In a browser.")(command)
    command = click.option("--seconds", type=DURATION, help="End after so long.")(command)
    command = click.option("--schedulers", type=int, default=1, show_default=True)(command)
    command = click.option(
        "--concurrency", type=int, help="Tasks at a time; default: the app's, or 8."
    )(command)
    command = click.option("--workers", type=int, default=1, show_default=True)(command)
    return served(command)


@click.command(cls=Command)
@click.option(
    "-A",
    "--app",
    metavar="MODULE[:NAME]",
    help="Where the handlers are: a function that gets the queue and returns a Worker, or a module "
    "of handler classes.",
)
@click.option("--demo", "is_demo", is_flag=True, help="With made-up users and tasks.")
@alerting
@metered
@run_options
@pass_session
def up(session: Session, app: str | None, is_demo: bool, metering: Metering, **options: Any) -> int:
    """Scheduler, workers and dashboard together.

    Without --url, --embedded and $FAIRQUEUE_URL, a server of their own is started, whose data is
    gone in the end.
    """
    session.check()
    if is_demo and app is not None:
        raise ConfigurationError("--demo brings its own handlers: leave --app out")
    if app is not None:
        check_app(app)
    # A demo fills a queue: not that of a Redis which the environment happens to name.
    url = session.url if is_demo else session.named_url
    options |= {"metrics_host": metering.host, "metrics_port": metering.port}
    return _up(session, url=url, app=app, demo=is_demo, **options)


@click.command(cls=Command)
@run_options
@pass_session
def demo(session: Session, **options: Any) -> int:
    """The same with made-up users and tasks, to look at.

    Without --url or --embedded a server of its own is started: $FAIRQUEUE_URL is not heeded.
    """
    session.check()
    return _up(session, url=session.url, app=None, demo=True, **options)


def _up(
    session: Session,
    url: str | None,
    app: str | None,
    concurrency: int | None,
    alerts: Alerts | None = None,
    **options: Any,
) -> int:
    try:
        from fairqueue.service import run
    except ImportError as error:
        raise _missing(error) from None
    path = session.embedded
    named = None if path is not None else url
    given: dict[str, Any] = {} if concurrency is None else {"concurrency": concurrency}
    if alerts is not None:
        given["alerts"] = alerts
    # The app gets what was given here and no default: it may have its own, or take none.
    make = None if app is None else lambda queue, _: load_worker(app, queue, given)
    return run(url=named, embedded_path=path, queue=session.queue, app=make, **given, **options)


@click.command(cls=Command, usual_level="info")
@served
@click.option("--read-only", is_flag=True, help="Look, and change nothing.")
@pass_session
def dashboard(session: Session, host: str, port: int, read_only: bool) -> int:
    """The dashboard and the REST API, until SIGINT or SIGTERM."""
    try:
        from fairqueue.web import WebServer, create_app
    except ImportError as error:
        raise _missing(error) from None
    with session.open() as queue:
        app = create_app(queue, read_only=read_only)
        with WebServer(app, host, port) as server:
            secret = AccessStore(queue.link).create_login(actor())
            lines = (
                f"Dashboard  {server.url}",
                f"Log in     {server.url}/login?token={secret}  (once, within 10 minutes)",
            )
            if not until_signalled(server.is_alive, lambda: say("\n".join(lines))):
                note("the thread that serves the dashboard has ended")
                return FAILED
    return OK


def _missing(error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"{error.name or error} is not installed: pip install 'fairqueue[web,embedded]'"
    )
