"""What goes on until it is stopped: `scheduler`, `worker` and `metrics`."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from fairqueue.alerts import Alerts
from fairqueue.cli.alert_options import alerting
from fairqueue.cli.apps import load_worker
from fairqueue.cli.exit_codes import FAILED, NO_REDIS, OK, UNHEALTHY
from fairqueue.cli.metrics_options import Metering, metered
from fairqueue.cli.output import json_text, note, say
from fairqueue.cli.session import (
    Command,
    Session,
    check_redis,
    ended_by_signals,
    pass_session,
    reading,
    until_signalled,
)
from fairqueue.cli.text import in_words
from fairqueue.cli.values import DURATION
from fairqueue.errors import ConfigurationError, RedisRefused
from fairqueue.metrics.collectors import QueueCollector, serve_metrics
from fairqueue.scheduler.daemon import OUTAGE, OVERRUNS, Daemon, Totals, run_once, term_for
from fairqueue.scheduler.scheduler import TaskScheduler

USUAL_INTERVAL_S = 1.0


@contextmanager
def open_scheduler(
    session: Session,
    interval: float = USUAL_INTERVAL_S,
    lock_timeout: float = 10.0,
    alerts: Alerts | None = None,
) -> Iterator[TaskScheduler]:
    """The scheduler on the queue that the options name; Redis has answered."""
    with session.open(check=False) as queue:
        try:
            scheduler = TaskScheduler(
                queue, check_interval=interval, lock_timeout=lock_timeout, alerts=alerts
            )
        except RedisRefused as error:
            # A password or a permission: not the trouble of one pass.
            raise ConfigurationError(str(error)) from error
        yield scheduler


# --- scheduler ------------------------------------------------------------------------------------


@click.command(cls=Command, usual_level="info")
@click.option("--once", is_flag=True, help="Fire what is due and end, for cron.")
@click.option("--interval", type=float, help="Look at least so often, in seconds; default: 1.")
@click.option(
    "--lock-timeout",
    type=float,
    help="Another instance takes over so many seconds after this one was killed; "
    "default: 10, or three intervals if that is more.",
)
@click.option(
    "--max-overruns",
    type=int,
    help=f"End with exit code {UNHEALTHY} after so many passes in a row that took longer than the "
    "interval.",
)
@click.option(
    "--exit-on-outage",
    is_flag=True,
    default=None,
    help=f"End with exit code {NO_REDIS} when Redis goes away; default: wait until it is back.",
)
@alerting
@metered
@reading
@pass_session
def scheduler(
    session: Session,
    once: bool,
    interval: float | None,
    lock_timeout: float | None,
    max_overruns: int | None,
    exit_on_outage: bool | None,
    alerts: Alerts | None,
    metering: Metering,
) -> int:
    """Fire schedules until SIGINT or SIGTERM. With --once, fire what is due now and end."""
    if not once:
        every = USUAL_INTERVAL_S if interval is None else interval
        with (
            metering.taken() as serve,
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
                "seconds: raise --interval, or look why Redis is slow"
            )
        return {OVERRUNS: UNHEALTHY, OUTAGE: NO_REDIS}.get(end, OK)
    given = {
        "--interval": interval,
        "--lock-timeout": lock_timeout,
        "--max-overruns": max_overruns,
        "--exit-on-outage": exit_on_outage or None,
        "--metrics-port": metering.port,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(f"{name} makes no sense with --once")
    return _fire_once(session, alerts)


def _fire_once(session: Session, alerts: Alerts | None) -> int:
    """Fire what is due, and say what happened."""
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
    """What a run of --once did, for people."""
    line = in_words(totals.as_dict())
    return line if leader is None else f"{line}; {leader} leads, and fires what is due"


def _outcome_json(totals: Totals, leader: str | None) -> str:
    """The same for machines; `leader` is who else leads, or null."""
    return json_text({**totals.as_dict(), "failed": totals.failed, "leader": leader})


def _say_statistics(session: Session, daemon: Daemon, end: str) -> None:
    """What a daemon that has ended did."""
    statistics = daemon.statistics()
    say(in_words(statistics) if session.is_table else json_text({"end": end, **statistics}))


# --- worker ---------------------------------------------------------------------------------------


@click.command(cls=Command, usual_level="info")
@click.option(
    "-A",
    "--app",
    required=True,
    metavar="MODULE[:NAME]",
    help="Where the handlers are: a Worker, a function that gets the queue and returns a Worker, "
    "or a module of handler classes.",
)
@click.option("--concurrency", type=int, help="Tasks at a time; default: the app's, or 8.")
@click.option("--processes", type=int, help="So many processes; default: the app's, or none.")
@click.option("--lease", type=DURATION, help="Of a task; default: the app's, or 30s.")
@click.option(
    "--timeout",
    type=DURATION,
    default="30s",
    show_default=True,
    help="At the end, so long for what runs.",
)
@click.option("--burst", is_flag=True, help="Run what is ready, then end.")
@alerting
@metered
@pass_session
def worker(
    session: Session,
    app: str,
    concurrency: int | None,
    processes: int | None,
    lease: float | None,
    timeout: float,
    burst: bool,
    alerts: Alerts | None,
    metering: Metering,
) -> int:
    """Run tasks until SIGINT or SIGTERM, then finish what runs."""
    given = {"concurrency": concurrency, "processes": processes, "lease": lease, "alerts": alerts}
    settings = {name: value for name, value in given.items() if value is not None}
    if burst and metering.port is not None:
        raise ConfigurationError("--metrics-port makes no sense with --burst")
    with metering.taken() as serve, session.open(check=False) as queue:
        instance = load_worker(app, queue, settings)
        check_redis(instance.queue)  # a worker that is made already has a queue of its own
        if burst:
            say(str(instance.run_until_empty()))
            return OK
        # Not before it has started: its processes are forked while there is no other thread.
        ended = instance.forever(timeout, started=lambda: serve(REGISTRY, instance.registry))
        return OK if ended else FAILED


# --- metrics --------------------------------------------------------------------------------------


@click.command(cls=Command, usual_level="info")
@click.option("--port", type=int, help="Answer scrapes here until SIGINT or SIGTERM; 0: any.")
@click.option("--host", default="127.0.0.1", show_default=True, help="With --port.")
@pass_session
def metrics(session: Session, port: int | None, host: str) -> int:
    """Print metrics in the text format of Prometheus. With --port, answer scrapes."""
    with session.open() as queue:
        registry = CollectorRegistry()
        if port is None:
            registry.register(QueueCollector(queue))
            say(generate_latest(registry).decode().rstrip("\n"))
            return OK
        with serve_metrics(queue, port, host, registry) as server:
            line = f"metrics at http://{host}:{server.port}/metrics"
            if not until_signalled(server.is_alive, lambda: note(line)):
                note("the thread that answers scrapes has ended")
                return FAILED
    return OK
