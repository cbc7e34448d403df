"""Move a queue to another one with a different number of partitions."""

from fairqueue.repartition.counting import QueueCounts, count
from fairqueue.repartition.repartition import MoveReport, Repartition

__all__ = ["MoveReport", "QueueCounts", "Repartition", "count"]
