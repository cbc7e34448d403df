"""Schedules in Redis: definitions, plans, changes in bulk, backfill, import and export."""

from fairqueue.schedules.import_export import dump_schedules, load_schedules
from fairqueue.schedules.store import (
    Change,
    Definition,
    ScheduleOptions,
    ScheduleStore,
    Stored,
    check_change,
    check_id,
    check_list,
    fields_of,
    new_revision,
    past_moment,
    policy_of,
    read_definition,
    recurrence_of,
    user_form,
)

__all__ = [
    "Change",
    "Definition",
    "ScheduleOptions",
    "ScheduleStore",
    "Stored",
    "check_change",
    "check_id",
    "check_list",
    "dump_schedules",
    "fields_of",
    "load_schedules",
    "new_revision",
    "past_moment",
    "policy_of",
    "read_definition",
    "recurrence_of",
    "user_form",
]
