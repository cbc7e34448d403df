"""The long-running commands: `scheduler`, `worker` and `metrics`."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from fairqueue.alerts import Alerts
from fairqueue.cli.alert_options import alert_options
from fairqueue.cli.apps import load_worker, pool_option
from fairqueue.cli.exit_codes import FAILED, NO_REDIS, OK, UNHEALTHY
from fairqueue.cli.metrics_options import MetricsOptions, metrics_options
from fairqueue.cli.output import json_text, note, say
from fairqueue.cli.session import (
    Command,
    Session,
    check_redis,
    ended_by_signals,
    pass_session,
    prints_data,
    until_signalled,
)
from fairqueue.cli.text import in_words
from fairqueue.cli.values import DURATION
from fairqueue.errors import ConfigurationError, RedisRefused
from fairqueue.metrics.collectors import QueueCollector, serve_metrics
from fairqueue.scheduler.daemon import OUTAGE, OVERRUNS, Daemon, Totals, run_once, term_for
from fairqueue.scheduler.scheduler import TaskScheduler

DEFAULT_INTERVAL_S = 1.0


@contextmanager
def open_scheduler(
    session: Session,
    interval: float = DEFAULT_INTERVAL_S,
    lock_timeout: float = 10.0,
    alerts: Alerts | None = None,
) -> Iterator[TaskScheduler]:
    """A scheduler on the queue that the options name. Redis has answered."""
    with session.open(check=False) as queue:
        try:
            scheduler = TaskScheduler(
                queue, check_interval=interval, lock_timeout=lock_timeout, alerts=alerts
            )
        except RedisRefused as error:
            # A wrong password or a missing permission does not go away with the next pass.
            raise ConfigurationError(str(error)) from error
        yield scheduler


# --- scheduler ------------------------------------------------------------------------------------


@click.command(cls=Command, default_level="info")
@click.option("--once", is_flag=True, help="Fire what is due and exit, for use with cron.")
@click.option("--interval", type=float, help="Maximum seconds between passes; default: 1.")
@click.option(
    "--lock-timeout",
    type=float,
    help="Seconds until another instance takes over if this one is killed; default: 10, or three "
    "intervals if that is more.",
)
@click.option(
    "--max-overruns",
    type=int,
    help=f"Exit with code {UNHEALTHY} after this many passes in a row that took longer than the "
    "interval.",
)
@click.option(
    "--exit-on-outage",
    is_flag=True,
    default=None,
    help=f"Exit with code {NO_REDIS} when Redis is unreachable; default: wait until it is back.",
)
@alert_options
@metrics_options
@prints_data
def scheduler(
    session: Session,
    once: bool,
    interval: float | None,
    lock_timeout: float | None,
    max_overruns: int | None,
    exit_on_outage: bool | None,
    alerts: Alerts | None,
    metrics: MetricsOptions,
) -> int:
    """Fire schedules until SIGINT or SIGTERM. With --once, fire what is due now and exit."""
    if not once:
        every = DEFAULT_INTERVAL_S if interval is None else interval
        with (
            metrics.bound() as serve,
            open_scheduler(session, every, term_for(every, lock_timeout), alerts) as instance,
        ):
            daemon = Daemon(
                instance,
                interval=every,
                max_overruns=max_overruns,
                exit_on_outage=bool(exit_on_outage),
            )
            with ended_by_signals(daemon.stop):
                serve(REGISTRY)
                end = daemon.run()
        _say_statistics(session, daemon, end)
        if end == OVERRUNS:
            note(
                f"{max_overruns} passes in a row took longer than the interval of {every:g} "
                "seconds: raise --interval, or find out why Redis is slow"
            )
        return {OVERRUNS: UNHEALTHY, OUTAGE: NO_REDIS}.get(end, OK)
    given = {
        "--interval": interval,
        "--lock-timeout": lock_timeout,
        "--max-overruns": max_overruns,
        "--exit-on-outage": exit_on_outage or None,
        "--metrics-port": metrics.port,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(f"{name} cannot be used with --once")
    return _fire_once(session, alerts)


def _fire_once(session: Session, alerts: Alerts | None) -> int:
    """Fire what is due, and print what was done."""
    asked: list[bool] = []
    with (
        open_scheduler(session, alerts=alerts) as instance,
        ended_by_signals(lambda: asked.append(True)),
    ):
        totals = run_once(instance, lambda: bool(asked))
        leader = None
        if totals.passes and not totals.is_leader:
            leader = instance.health().leader or "another instance"
    say(_outcome_line(totals, leader) if session.is_table else _outcome_json(totals, leader))
    return FAILED if totals.failed else OK


def _outcome_line(totals: Totals, leader: str | None) -> str:
    """The result of --once, for people."""
    line = in_words(totals.as_dict())
    return line if leader is None else f"{line}; {leader} is the leader and fires what is due"


def _outcome_json(totals: Totals, leader: str | None) -> str:
    """The result of --once as JSON; `leader` is another instance that leads, or null."""
    return json_text({**totals.as_dict(), "failed": totals.failed, "leader": leader})


def _say_statistics(session: Session, daemon: Daemon, end: str) -> None:
    """Print what a daemon has done."""
    statistics = daemon.statistics()
    say(in_words(statistics) if session.is_table else json_text({"end": end, **statistics}))


# --- worker ---------------------------------------------------------------------------------------


@click.command(cls=Command, default_level="info")
@click.option(
    "-A",
    "--app",
    required=True,
    metavar="MODULE[:NAME]",
    help="The handlers: a Worker, a function that takes the queue and returns a Worker, or a "
    "module of handler classes.",
)
@click.option(
    "--concurrency", type=int, help="Tasks to run at the same time; default: the app's, or 8."
)
@pool_option
@click.option(
    "--processes",
    type=int,
    help="Number of processes; default: set by the app, otherwise a single process.",
)
@click.option("--lease", type=DURATION, help="Lease of a task; default: the app's, or 30s.")
@click.option(
    "--timeout",
    type=DURATION,
    default="30s",
    show_default=True,
    help="How long to wait for running tasks at shutdown.",
)
@click.option("--burst", is_flag=True, help="Run what is ready, then exit.")
@alert_options
@metrics_options
@pass_session
def worker(
    session: Session,
    app: str,
    concurrency: int | None,
    pools: tuple[str, ...],
    processes: int | None,
    lease: float | None,
    timeout: float,
    burst: bool,
    alerts: Alerts | None,
    metrics: MetricsOptions,
) -> int:
    """Run tasks until SIGINT or SIGTERM. On shutdown, running tasks are allowed to finish."""
    given: dict[str, object] = {"concurrency": concurrency, "pools": pools or None}
    given |= {"processes": processes, "lease": lease, "alerts": alerts}
    settings = {name: value for name, value in given.items() if value is not None}
    if burst and metrics.port is not None:
        raise ConfigurationError("--metrics-port cannot be used with --burst")
    with metrics.bound() as serve, session.open(check=False) as queue:
        instance = load_worker(app, queue, settings)
        check_redis(instance.queue)  # a Worker object has a queue of its own
        if burst:
            try:
                say(str(instance.run_until_empty()))
            finally:
                instance.stop(timeout)  # it counts as alive until then
            return OK
        # Only after it has started: its processes are forked while there is no other thread.
        ended = instance.forever(timeout, started=lambda: serve(REGISTRY, instance.registry))
        return OK if ended else FAILED


# --- metrics --------------------------------------------------------------------------------------


@click.command(cls=Command, default_level="info")
@click.option(
    "--port", type=int, help="Serve metrics on this port until SIGINT or SIGTERM; 0: any free port."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="With --port.")
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    help="Add the metrics of this tenant; can be given up to 100 times.",
)
@pass_session
def metrics(session: Session, port: int | None, host: str, tenants: tuple[str, ...]) -> int:
    """Print metrics in the Prometheus text format. With --port, serve them."""
    with session.open() as queue:
        registry = CollectorRegistry()
        if port is None:
            registry.register(QueueCollector(queue, tenants))
            say(generate_latest(registry).decode().rstrip("\n"))
            return OK
        with serve_metrics(queue, port, host, registry, tenants) as server:
            line = f"metrics at http://{host}:{server.port}/metrics"
            if not until_signalled(server.is_alive, lambda: note(line)):
                note("the thread that serves metrics has ended")
                return FAILED
    return OK
