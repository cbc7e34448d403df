"""The doctor: examines a queue and its Redis, and repairs indexes and counts."""

from fairqueue.doctor.examination import Doctor
from fairqueue.doctor.findings import OK, PROBLEM, WARNING, Finding
from fairqueue.doctor.records import MOST_LEASES, Records
from fairqueue.doctor.server import FULL_SHARE, FULLER_SHARE, SKEW_S, SLOW_S

__all__ = [
    "FULLER_SHARE",
    "FULL_SHARE",
    "MOST_LEASES",
    "OK",
    "PROBLEM",
    "SKEW_S",
    "SLOW_S",
    "WARNING",
    "Doctor",
    "Finding",
    "Records",
]
