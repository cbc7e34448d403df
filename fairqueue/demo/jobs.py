"""A fictional school platform: its jobs, its users and its failures.

The demo runs these jobs, and the seeder writes a history of them.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from fairqueue.access.credentials import Actor
from fairqueue.models import Task
from fairqueue.queue.reports import Failure
from fairqueue.validation import Priority

ZONE = "Africa/Nairobi"
TENANTS = ("greenfield", "hillcrest", "lakeside")
ROLES = ("office", "bursar", "admissions", "transport")  # of the users that each school has
POOLS = ("default", "reports")  # that the workers serve
RETRIES, BACKOFF = 2, [60.0, 120.0]  # of all jobs; seconds

# Who acts: people of the platform see all schools, people of a school only theirs.
ADMIN = Actor(name="amina.hassan", role="admin", via="web")
OPERATOR = Actor(name="otieno.odhiambo", role="operator", via="cli")


def staff(tenant: str | None) -> Actor:
    """Return the operator of a school's jobs; for None, of the platform's."""
    if tenant is None:
        return OPERATOR
    return Actor(name=f"grace@{tenant}", role="operator", tenant=tenant, via="web")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A way in which a job fails."""

    type: str
    message: str
    place: str  # file:function
    line: int
    code: str

    def failure(self) -> Failure:
        """Return the failure, with a traceback."""
        file, _, function = self.place.partition(":")
        traceback = (
            "Traceback (most recent call last):\n"
            f'  File "/srv/school/jobs/{file}", line {self.line - 27}, in handle\n'
            f"    {function}(payload, context)\n"
            f'  File "/srv/school/jobs/{file}", line {self.line}, in {function}\n'
            f"    {self.code}\n"
            f"{self.type}: {self.message}"
        )
        return Failure(type=self.type, message=self.message, traceback=traceback, place=self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job: its schedule, and what its runs look like. jobs.toml lists them.

    school: the number of its tenant, None for the platform. role: of its user. share: how many of a
    hundred runs are its own. seconds: the least and the longest time of a run. A failed run with
    all its retries must end before the next run is due, which would otherwise be skipped. lines:
    what it logs. result: the name of what it counts. flow: the pool, keys, unique key, cost and
    expiry of its tasks; {school} stands for the school.
    """

    name: str
    title: str
    role: str
    seconds: Sequence[float]
    timeout: float
    payload: dict[str, Any]
    lines: Sequence[str]
    result: str
    fault: Fault
    priority: Priority
    cron: str = ""
    school: int | None = None
    share: int = 0
    flow: dict[str, Any] = field(default_factory=dict)

    @property
    def schedule_id(self) -> str:
        """The id of its schedule: its name in lower case, without "Job"."""
        words = re.findall("[A-Z][a-z]*", self.name.removesuffix("Job"))
        return "-".join(words).lower()

    def tenant(self, tenants: Sequence[str]) -> str | None:
        """Return its school, or None for the platform."""
        return None if self.school is None else tenants[self.school % len(tenants)]

    def user(self, tenants: Sequence[str]) -> str:
        """Return its user."""
        tenant = self.tenant(tenants)
        return self.role if tenant is None else f"{tenant}.{self.role}"

    def flow_of(self, tenant: str | None) -> dict[str, Any]:
        """Return the flow of its tasks for a school."""
        found = dict(self.flow)
        if "limit_keys" in found:
            found["limit_keys"] = [key.format(school=tenant) for key in found["limit_keys"]]
        return found

    def schedule(self, tenants: Sequence[str], **fields: Any) -> dict[str, Any]:
        """Return the fields of a schedule of this job, with these besides its own."""
        return {
            "user_id": self.user(tenants),
            "tenant": self.tenant(tenants),
            "name": self.name,
            "timezone": ZONE,
            "payload": self.payload,
            **self.flow_of(self.tenant(tenants)),
            **fields,
        }

    def task(self, user: str, tenant: str | None, **fields: Any) -> Task:
        """Return a task of this job that a user has asked for."""
        return Task.create(
            user_id=user,
            tenant=tenant,
            name=self.name,
            payload=self.payload,
            triggered_by=user,
            **{**self.flow_of(tenant), **fields},
        )


def _load() -> Iterator[Job]:
    text = (resources.files(__package__) / "jobs.toml").read_text(encoding="utf-8")
    for fields in tomllib.loads(text)["jobs"]:
        fields["fault"] = Fault(**fields["fault"])
        fields["priority"] = Priority[fields.get("priority", "NORMAL")]
        yield Job(**fields)


*JOBS, IMPORT = _load()
# Weights and limits of users, by the part of their name after the school.
USER_SETTINGS: dict[str, dict[str, Any]] = {
    "system": {"weight": 2.0},
    "bursar": {"weight": 3.0, "max_running": 4},
    "office": {"weight": 2.0},
    "admissions": {"weight": 1.0, "rate": 0.5},
    "transport": {"weight": 0.5, "max_running": 1},
    "imports": {"weight": 1.0, "max_waiting": 20_000},
}
# Weights and limits of schools, in order; further schools have none.
TENANT_SETTINGS: tuple[dict[str, Any], ...] = (
    {"weight": 1.5},
    {"weight": 1.0, "max_waiting": 50_000},
    {"weight": 2.0, "max_running": 6},
)
# One run at a time for each account of a school, in order; few text messages a second in all.
KEY_LIMITS: dict[str, dict[str, Any]] = {
    "account:*": {"slots": 1, "ordered": True, "scope": "tenant"},
    "sms": {"rate": 2.5},
}
# Schedules that were paused: at least how many days ago, and why.
PAUSES = {
    "ExpireWaitlistOffersJob": (8, "Admissions are closed until the new term"),
    "CleanupGpsLogsJob": (5, "Transport audit: keep all positions until it is over"),
}
