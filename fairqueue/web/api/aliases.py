"""Take the names that a table of cron jobs has for the fields of a job, on input.

Some systems that schedule jobs say `job_class`, `cron_expression` or `max_retries`. A body may use
these names instead of ours; each stands for one field, and what both say must be the same. A job
that is made in these terms has their defaults: three retries after 60, 120 and 240 seconds, an hour
at most, and no run beside an unfinished one.
"""

from typing import Any

from fairqueue.errors import shown
from fairqueue.web.api.errors import Refused, refuse
from fairqueue.web.api.models import JobChanges, JobCopy, JobReplacement, NewJob

# Their names, and ours.
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
}
_ID: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "job_class": {"type": "string", "description": "`name`; beside it, `name` is the title"},
    "job_method": {"type": "string", "enum": ["handle"], "description": "has no meaning here"},
    "parameters": {"type": "object", "description": "`payload`"},
    "cron_expression": {"type": "string", "description": "`cron_expr`"},
    "run_as_user_id": {**_ID, "description": "`user_id`"},
    "school_id": {**_ID, "description": "`tenant`"},
    "max_retries": {"type": "integer", "minimum": 0, "description": "`retries`; usually 3"},
    "retry_delay_seconds": {
        "type": "number",
        "minimum": 0,
        "description": "`backoff`, which doubles with each retry; usually 60",
    },
    "timeout_seconds": {"type": "number", "minimum": 0, "description": "`timeout`; usually 3600"},
    "overlap_prevention": {
        "type": "boolean",
        "description": '`overlap`: "skip" if true, "allow" if false; usually true',
    },
}
IDS = ("run_as_user_id", "school_id")  # numbers there, texts here; null: none
METHOD = "handle"
# What a job has that is made in these terms and does not say otherwise.
USUAL: dict[str, Any] = {"retries": 3, "backoff": 60, "timeout": 3600, "overlap": "skip"}

WHOLE: tuple[Any, ...] = (NewJob, JobReplacement)  # bodies that say all of a job
TAKEN: tuple[Any, ...] = (*WHOLE, JobChanges, JobCopy)


def resolve(body: Any, model: Any) -> tuple[Any, dict[str, str]]:
    """A body in our terms, and which of their names it used, by ours. Raises Refused: 422."""
    if model not in TAKEN or not isinstance(body, dict):
        return body, {}
    known = [name for name in SCHEMAS if name in body]
    if not known:
        return body, {}
    given = {name: value for name, value in body.items() if name not in SCHEMAS}
    _check_method(body.get("job_method"))
    if "job_class" in body:
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
        given = USUAL | given
    return given, used


def _check_method(method: Any) -> None:
    if method not in (None, METHOD):
        raise refuse(
            422,
            "invalid-input",
            f"body: job_method {shown(method)} cannot be used: a worker finds its handler by "
            f"job_class alone; leave it out, or say {METHOD!r}",
            field="job_method",
        )


def _use_title(given: dict[str, Any], job_class: Any) -> None:
    """Beside `job_class`, `name` is what people call the job."""
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
    if ours == "payload":  # which may hold secrets
        said = f"{theirs} and {ours}"
    return refuse(
        422,
        "invalid-input",
        f"body: {said} are two names of one field with different values: give one of them",
        field=theirs,
    )
