"""`--metrics-port` of programs that go on: what this program counts, for Prometheus."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
from prometheus_client import CollectorRegistry

from fairqueue.cli.output import note
from fairqueue.metrics.collectors import MetricsServer


@dataclass(frozen=True, slots=True)
class Metering:
    """Where scrapes are answered; nowhere without a port."""

    host: str
    port: int | None

    @contextmanager
    def taken(self) -> Iterator[Callable[..., None]]:
        """The port is taken; what is given answers scrapes with registries, from its call on.

        A port that cannot be had must be told before anything is started. Raises
        ConfigurationError.
        """
        if self.port is None:
            yield lambda *registries: None
            return
        with MetricsServer(self.port, self.host) as server:

            def serve(*registries: CollectorRegistry) -> None:
                server.start(*registries)
                note(f"metrics at {server.url}")

            yield serve


def metered(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--metrics-port` and `--metrics-host`; the command gets both as `metering`."""

    @click.option(
        "--metrics-port",
        type=int,
        help="Answer scrapes of Prometheus here, with what this program counts; 0: any port.",
    )
    @click.option("--metrics-host", default="127.0.0.1", show_default=True)
    @functools.wraps(command)
    def metering(*args: Any, metrics_port: int | None, metrics_host: str, **settings: Any) -> Any:
        return command(*args, metering=Metering(metrics_host, metrics_port), **settings)

    return metering
