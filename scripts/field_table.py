"""Write the table of the fields of a schedule into docs/schedules.md.

    python scripts/field_table.py            write it
    python scripts/field_table.py --print    print it

The table in the docs is made from fairqueue/schedules/fields.py; a test compares the two.
"""

import re
import sys
from pathlib import Path

from fairqueue.schedules.fields import REQUIRED, TABLE, ScheduleField

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schedules.md"
# The table is between these lines.
BEGIN, END = "<!-- fields: made by scripts/field_table.py -->", "<!-- end of fields -->"

TYPES = {
    "backoff": "duration, or a list",
    "cron": "cron expression",
    "dates": "list of dates",
    "flag": "true or false",
    "lines": "text",
    "object": "JSON object",
    "priority": "1 to 6",
    "seconds": "duration",
    "texts": "list of texts",
    "windows": "list of windows",
    "zone": "time zone",
}


def field_table() -> str:
    """Return the table in Markdown."""
    rows = ["| field | value | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{each.name}` | {_value(each)} | {_default(each)} | {each.help} |" for each in TABLE
    ]
    return "\n".join(rows)


def _value(each: ScheduleField) -> str:
    choices = [f"`{choice}`" for choice in each.choices if choice]
    if each.kind == "choice":
        return ", ".join(choices)
    if each.kind == "period":
        return ", ".join(choices) + " or a duration"
    return TYPES.get(each.kind, each.kind)


def _default(each: ScheduleField) -> str:
    if each.default is None or each.default is REQUIRED:
        return "" if each.default is None or not each.adds else "required"
    value = each.to_document(each.default)
    return f"{value} s" if each.kind == "duration" else f"`{value}`"


def with_table(page: str) -> str:
    """Return the page with the table of today."""
    between = re.compile(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    return between.sub(lambda _: f"{BEGIN}\n\n{field_table()}\n\n{END}", page)


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(field_table())
    else:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
