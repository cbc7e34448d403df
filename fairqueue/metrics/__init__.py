"""Metrics for Prometheus: of this process, of a queue, and added up over processes."""

from fairqueue.metrics.collectors import (
    Metrics,
    MetricsServer,
    QueueCollector,
    SchedulerMetrics,
    WorkerMetrics,
    made_once,
    scheduler_metrics,
    serve_metrics,
    worker_metrics,
)

__all__ = [
    "Metrics",
    "MetricsServer",
    "QueueCollector",
    "SchedulerMetrics",
    "WorkerMetrics",
    "made_once",
    "scheduler_metrics",
    "serve_metrics",
    "worker_metrics",
]
