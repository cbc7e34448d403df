"""`--metrics-port` of long-running commands: metrics of this process for Prometheus."""

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
class MetricsOptions:
    """Where to serve metrics; nowhere without a port."""

    host: str
    port: int | None

    @contextmanager
    def bound(self) -> Iterator[Callable[..., None]]:
        """Bind the port, and yield a function that starts to serve registries on it.

        A port that is in use must be reported before anything is started. Raises
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


def metrics_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--metrics-port` and `--metrics-host`, passed to the command as `metrics`."""

    @click.option(
        "--metrics-port",
        type=int,
        help="Serve metrics of this process to Prometheus on this port; 0: any free port.",
    )
    @click.option("--metrics-host", default="127.0.0.1", show_default=True)
    @functools.wraps(command)
    def with_metrics(
        *args: Any, metrics_port: int | None, metrics_host: str, **settings: Any
    ) -> Any:
        return command(*args, metrics=MetricsOptions(metrics_host, metrics_port), **settings)

    return with_metrics
