"""The commands that serve the dashboard: `up`, `demo` and `dashboard`."""

from contextlib import ExitStack
from typing import Any

import click

from fairqueue.access.credentials import AccessStore
from fairqueue.alerts import Alerts
from fairqueue.cli.alert_options import alert_options
from fairqueue.cli.apps import check_app, load_worker, pool_option
from fairqueue.cli.exit_codes import FAILED, OK
from fairqueue.cli.metrics_options import MetricsOptions, metrics_options
from fairqueue.cli.output import note, say
from fairqueue.cli.session import Command, Session, actor, options, pass_session, until_signalled
from fairqueue.cli.values import DURATION
from fairqueue.errors import ConfigurationError, shown
from fairqueue.runtime.cluster import EmbeddedCluster

DEFAULT_PORT = 8844
CLUSTER_PARTITIONS = 12  # of the queue of `--cluster`: some on each of its servers

served = options(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port", type=int, default=DEFAULT_PORT, show_default=True, help="Port to listen on."
    ),
)
run_options = options(
    served,
    click.option("--workers", type=int, default=1, show_default=True, help="Number of workers."),
    click.option(
        "--concurrency", type=int, help="Tasks at the same time; default: the app's, or 8."
    ),
    click.option(
        "--schedulers", type=int, default=1, show_default=True, help="Number of schedulers."
    ),
    click.option(
        "--cluster",
        is_flag=True,
        help=f"Start a temporary cluster of three servers; {CLUSTER_PARTITIONS} partitions by "
        "default.",
    ),
    click.option("--seconds", type=DURATION, help="Stop after this long."),
    click.option("--open", "open_browser", is_flag=True, help="Open it in a browser."),
)


@click.command(cls=Command)
@click.option(
    "-A",
    "--app",
    metavar="MODULE[:NAME]",
    help="The handlers: a function that takes the queue and returns a Worker, or a module of "
    "handler classes.",
)
@click.option("--demo", "is_demo", is_flag=True, help="Add sample users and tasks.")
@pool_option
@alert_options
@metrics_options
@run_options
@pass_session
def up(
    session: Session,
    app: str | None,
    is_demo: bool,
    pools: tuple[str, ...],
    metrics: MetricsOptions,
    **settings: Any,
) -> int:
    """Run scheduler, workers and dashboard together.

    Without --url, --embedded and $FAIRQUEUE_URL, a temporary server is started. Its data is deleted
    at the end.
    """
    session.check()
    if is_demo and app is not None:
        raise ConfigurationError("--demo has its own handlers: remove --app")
    if pools and app is None:
        raise ConfigurationError(
            f"--pool {shown(pools[0])} needs --app, whose workers take the tasks of the pool"
        )
    if app is not None:
        check_app(app)
    # A demo fills a queue, so the URL from the environment is ignored.
    url = session.url if is_demo else session.named_url
    settings |= {"metrics_host": metrics.host, "metrics_port": metrics.port}
    return _up(session, url=url, app=app, demo=is_demo, pools=pools, **settings)


@click.command(cls=Command)
@run_options
@pass_session
def demo(session: Session, **settings: Any) -> int:
    """Run `up` with sample users and tasks, to try it out.

    Without --url or --embedded, a temporary server is started: $FAIRQUEUE_URL is ignored.
    """
    session.check()
    return _up(session, url=session.url, app=None, demo=True, **settings)


def _up(
    session: Session,
    url: str | None,
    app: str | None,
    concurrency: int | None,
    alerts: Alerts | None = None,
    pools: tuple[str, ...] = (),
    cluster: bool = False,
    **settings: Any,
) -> int:
    if cluster and (session.url is not None or session.embedded is not None):
        raise ConfigurationError("--cluster starts servers of its own: remove --url and --embedded")
    try:
        from fairqueue.service import run
    except ImportError as error:
        raise _missing(error) from None
    path = session.embedded
    named = None if path is not None else url
    given: dict[str, Any] = {} if concurrency is None else {"concurrency": concurrency}
    # As the URL, the number from the environment is not for the queue of a demo.
    partitions = session.partitions if settings["demo"] else session.named_partitions
    if partitions is not None:
        settings["partitions"] = partitions
    if alerts is not None:
        given["alerts"] = alerts
    # The app gets only the options that were given: it may have its own defaults.
    of_app = {**given, "pools": pools} if pools else given
    make = None if app is None else lambda queue, _: load_worker(app, queue, of_app)
    with ExitStack() as servers:
        if cluster:
            named = servers.enter_context(EmbeddedCluster.start()).url
            settings.setdefault("partitions", CLUSTER_PARTITIONS)
        settings |= {"url": named, "embedded_path": path, "queue": session.queue, "app": make}
        return run(**given, **settings)


@click.command(cls=Command, default_level="info")
@served
@click.option("--read-only", is_flag=True, help="Refuse all changes.")
@pass_session
def dashboard(session: Session, host: str, port: int, read_only: bool) -> int:
    """Serve the dashboard and the REST API until SIGINT or SIGTERM."""
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
