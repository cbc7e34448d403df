"""Schedules in Redis: their fields, definitions, plans and history, one by one or many at once."""

from fairqueue.schedules.fields import ScheduleOptions
from fairqueue.schedules.import_export import dump_schedules, load_schedules
from fairqueue.schedules.service import Schedules
from fairqueue.schedules.store import ScheduleStore

__all__ = ["ScheduleOptions", "ScheduleStore", "Schedules", "dump_schedules", "load_schedules"]
