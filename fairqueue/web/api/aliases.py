"""Accept alternative names for the fields of a job or a task.

Some job schedulers use names such as `job_class`, `cron_expression` and `max_retries`. A body may
use them instead of ours; if it has both, they must agree. A job that is created with these names
has their defaults: three retries after 60, 120 and 240 seconds, a time-out of an hour, and no
overlapping runs.
"""

from typing import Any

from fairqueue.errors import shown
from fairqueue.web.api.errors import Refused, refuse
from fairqueue.web.api.models import JobChanges, JobCopy, JobReplacement, NewJob, NewTask

# The alternative names, and ours.
NAMES: dict[str, str] = {
    "job_class": "name",
    "parameters": "payload",
    "cron_expression": "cron_expr",
    "run_as_user_id": "user_id",
    "school_id": "tenant",
    "max_retries": "retries",
    "retry_delay_seconds": "backoff",
    "timeout_seconds": "timeout",
    "overlap_prevention": "overlap",
    "queue_name": "pool",
}
_ID: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "job_class": {
        "type": "string",
        "description": "`name`; with both, `name` is the title",
    },
    "job_method": {"type": "string", "enum": ["handle"], "description": "ignored"},
    "parameters": {"type": "object", "description": "`payload`"},
    "cron_expression": {"type": "string", "description": "`cron_expr`"},
    "run_as_user_id": {**_ID, "description": "`user_id`"},
    "school_id": {**_ID, "description": "`tenant`"},
    "max_retries": {"type": "integer", "minimum": 0, "description": "`retries`; default 3"},
    "retry_delay_seconds": {
        "type": "number",
        "minimum": 0,
        "description": "`backoff`, which doubles with each retry; default 60",
    },
    "timeout_seconds": {"type": "number", "minimum": 0, "description": "`timeout`; default 3600"},
    "queue_name": {"type": "string", "minLength": 1, "description": "`pool`"},
    "overlap_prevention": {
        "type": "boolean",
        "description": '`overlap`: "skip" if true, "allow" if false; default true',
    },
}
IDS = ("run_as_user_id", "school_id")  # may be numbers; null means absent
METHOD = "handle"
# Defaults of a job that is created with these names.
DEFAULTS: dict[str, Any] = {"retries": 3, "backoff": 60, "timeout": 3600, "overlap": "skip"}

WHOLE: tuple[Any, ...] = (NewJob, JobReplacement)  # bodies with a whole job
TAKEN: tuple[Any, ...] = (*WHOLE, JobChanges, JobCopy, NewTask)


def names_for(model: Any) -> list[str]:
    """The alternative names that a body takes: those of fields that it has."""
    fields = model.__struct_fields__
    return [name for name in SCHEMAS if NAMES.get(name, "name") in fields]


def resolve(body: Any, model: Any) -> tuple[Any, dict[str, str]]:
    """The body with our names, and the names that it used, by ours. Raises Refused: 422."""
    if model not in TAKEN or not isinstance(body, dict):
        return body, {}
    known = [name for name in names_for(model) if name in body]
    if not known:
        return body, {}
    given = {name: value for name, value in body.items() if name not in known}
    _check_method(body.get("job_method"))
    if "job_class" in body and "title" in model.__struct_fields__:
        _use_title(given, body["job_class"])
    used: dict[str, str] = {}
    for theirs in known:
        if theirs == "job_method" or (theirs in IDS and body[theirs] is None):
            continue
        ours, value = NAMES[theirs], _value(theirs, body[theirs])
        if ours in given and given[ours] != value:
            raise _both(theirs, body[theirs], ours, given[ours])
        given[ours] = value
        used[ours] = theirs
    if model in WHOLE and ("job_class" in body or "cron_expression" in body):
        given = DEFAULTS | given
    return given, used


def _check_method(method: Any) -> None:
    if method not in (None, METHOD):
        raise refuse(
            422,
            "invalid-input",
            f"body: job_method must be {METHOD!r}, not {shown(method)}: a worker finds its handler "
            "by job_class alone",
            field="job_method",
        )


def _use_title(given: dict[str, Any], job_class: Any) -> None:
    """Use `name` as the title if there is a `job_class`."""
    name = given.get("name")
    if name is None or name == job_class:
        return
    if given.get("title", name) != name:
        raise _both("name", name, "title", given["title"])
    given["title"] = given.pop("name")


def _value(theirs: str, value: Any) -> Any:
    if theirs == "overlap_prevention":
        if not isinstance(value, bool):
            raise refuse(
                422,
                "invalid-input",
                f"body: overlap_prevention must be true or false, not {shown(value):.100}",
                field=theirs,
            )
        return "skip" if value else "allow"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if theirs in IDS and is_number else value


def _both(theirs: str, value: Any, ours: str, other: Any) -> Refused:
    said = f"{theirs} {shown(value):.100} and {ours} {shown(other):.100}"
    if ours == "payload":  # may contain secrets
        said = f"{theirs} and {ours}"
    return refuse(
        422,
        "invalid-input",
        f"body: {said} are the same field with different values: give one of them",
        field=theirs,
    )
