"""A school platform to play with: its jobs, its people and what goes wrong there.

The demo runs these jobs, and the seeder makes up a past for them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fairqueue.access.credentials import Actor
from fairqueue.queue.reports import Failure
from fairqueue.validation import Priority

ZONE = "Africa/Nairobi"
TENANTS = ("greenfield", "hillcrest", "lakeside")
ROLES = ("office", "bursar", "admissions", "transport")  # of the users that each school has
RETRIES, BACKOFF = 2, [60.0, 120.0]  # of all jobs; seconds

# Who did what: the platform's people see all schools, a school's own only theirs.
ADMIN = Actor(name="amina.hassan", role="admin", via="web")
OPERATOR = Actor(name="otieno.odhiambo", role="operator", via="cli")


def staff(tenant: str | None) -> Actor:
    """Who looks after the jobs of a school; None: after those of the platform."""
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
        """The failure, with a traceback."""
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
    """A built-in job: its schedule, and what its runs look like.

    school: the number of the tenant that it is done for, None for the platform. role: of the user
    that it is done for. share: how many of a hundred runs are its own. seconds: how long a run
    takes, from and to. With its retries a run that fails must end before the next one is due, or
    that one would be skipped.
    """

    name: str
    title: str
    cron: str
    school: int | None
    role: str
    share: int
    seconds: tuple[float, float]
    timeout: float
    payload: dict[str, Any]
    lines: tuple[str, ...]
    result: str  # what it counts
    fault: Fault
    priority: Priority = Priority.NORMAL

    @property
    def schedule_id(self) -> str:
        """The id of its schedule: its name in small letters, without the "Job"."""
        words = re.findall("[A-Z][a-z]*", self.name.removesuffix("Job"))
        return "-".join(words).lower()

    def tenant(self, tenants: Sequence[str]) -> str | None:
        """The school that it is done for, if it is one."""
        return None if self.school is None else tenants[self.school % len(tenants)]

    def user(self, tenants: Sequence[str]) -> str:
        """The user that it is done for."""
        tenant = self.tenant(tenants)
        return self.role if tenant is None else f"{tenant}.{self.role}"


JOBS = (
    Job(
        name="ProcessScheduledReportsJob",
        title="Generate and email scheduled reports",
        cron="*/5 * * * *",
        school=0,
        role="office",
        share=14,
        seconds=(1.5, 9.0),
        timeout=30.0,
        payload={"format": "pdf", "recipients": ["head@greenfield.example"]},
        lines=("collecting reports that are due", "rendered {n} reports", "e-mails handed over"),
        result="reports",
        fault=Fault(
            type="SMTPServerDisconnected",
            message="Connection unexpectedly closed",
            place="reports.py:send",
            line=118,
            code="smtp.send_message(message)",
        ),
    ),
    Job(
        name="SendFeeRemindersJob",
        title="Send payment reminders",
        cron="0 8 * * *",
        school=0,
        role="bursar",
        share=9,
        seconds=(20.0, 95.0),
        timeout=600.0,
        payload={"days_before_due": 3, "channel": "sms", "sms_api_key": "k-3f7a91"},
        lines=(
            "{n} invoices are due within 3 days",
            "sending in batches of 50",
            "all batches sent",
        ),
        result="reminders",
        fault=Fault(
            type="HTTPError",
            message="502 Bad Gateway from sms.example for batch 7",
            place="fees.py:send_batch",
            line=76,
            code="response.raise_for_status()",
        ),
        priority=Priority.HIGH,
    ),
    Job(
        name="CleanupExpiredSessionsJob",
        title="Remove expired sessions",
        cron="0 1 * * *",
        school=None,
        role="system",
        share=7,
        seconds=(0.4, 3.0),
        timeout=60.0,
        payload={"older_than_hours": 24},
        lines=("looking for expired sessions", "removed {n} sessions"),
        result="sessions",
        fault=Fault(
            type="OperationalError",
            message="deadlock detected on table sessions",
            place="sessions.py:delete_expired",
            line=41,
            code="cursor.execute(DELETE_EXPIRED, (before,))",
        ),
        priority=Priority.LOW,
    ),
    Job(
        name="SyncMpesaTransactionsJob",
        title="Reconcile M-Pesa payments",
        cron="*/15 * * * *",
        school=1,
        role="bursar",
        share=12,
        seconds=(3.0, 25.0),
        timeout=180.0,
        payload={"paybill": "522522", "api_token": "mp-77c1d0"},
        lines=("asking for transactions since the last run", "{n} transactions", "ledger agrees"),
        result="transactions",
        fault=Fault(
            type="ConnectionError",
            message="api.mpesa.example: read timed out after 30 s",
            place="mpesa.py:fetch",
            line=84,
            code="page = client.get(url, timeout=30)",
        ),
        priority=Priority.HIGH,
    ),
    Job(
        name="PurgeOldAuditLogsJob",
        title="Archive old audit entries",
        cron="0 2 * * 0",
        school=None,
        role="system",
        share=3,
        seconds=(45.0, 240.0),
        timeout=3600.0,
        payload={"older_than_days": 365},
        lines=("archiving entries older than a year", "{n} entries moved to cold storage"),
        result="entries",
        fault=Fault(
            type="OSError",
            message="[Errno 28] No space left on device: '/archive/audit-2024.zst'",
            place="audit.py:archive",
            line=63,
            code="target.write(chunk)",
        ),
        priority=Priority.VERY_LOW,
    ),
    Job(
        name="RefreshAggregateSummariesJob",
        title="Update daily fee summaries",
        cron="0 0 * * *",
        school=None,
        role="system",
        share=7,
        seconds=(8.0, 60.0),
        timeout=900.0,
        payload={"window_days": 1},
        lines=("refreshing summaries", "{n} accounts summed up", "caches invalidated"),
        result="accounts",
        fault=Fault(
            type="ZeroDivisionError",
            message="division by zero",
            place="summaries.py:average_fee",
            line=52,
            code="return total / len(accounts)",
        ),
    ),
    Job(
        name="SendLowBalanceAlertsJob",
        title="Wallet low balance notifications",
        cron="0 9 * * *",
        school=2,
        role="bursar",
        share=7,
        seconds=(2.0, 14.0),
        timeout=120.0,
        payload={"threshold": 200, "currency": "KES"},
        lines=("{n} wallets are below the threshold", "parents told"),
        result="alerts",
        fault=Fault(
            type="KeyError",
            message="'guardian_phone'",
            place="wallets.py:contact_of",
            line=33,
            code="return student['guardian_phone']",
        ),
    ),
    Job(
        name="ExpireWaitlistOffersJob",
        title="Expire unanswered admission offers",
        cron="0 10 * * *",
        school=2,
        role="admissions",
        share=5,
        seconds=(0.8, 5.0),
        timeout=60.0,
        payload={"answer_within_days": 7},
        lines=("{n} offers were not answered in time", "next on the list invited"),
        result="offers",
        fault=Fault(
            type="ValueError",
            message="offer 4711 has no expiry date",
            place="admissions.py:expire",
            line=58,
            code='raise ValueError(f"offer {offer.id} has no expiry date")',
        ),
    ),
    Job(
        name="CleanupGpsLogsJob",
        title="Purge old transport GPS data",
        cron="0 3 * * 0",
        school=1,
        role="transport",
        share=3,
        seconds=(30.0, 200.0),
        timeout=1800.0,
        payload={"keep_days": 90},
        lines=("dropping partitions older than 90 days", "{n} positions dropped"),
        result="positions",
        fault=Fault(
            type="LockTimeout",
            message="partition gps_2025_08 is locked by another session",
            place="transport.py:drop_partition",
            line=29,
            code="connection.execute(drop, timeout=10)",
        ),
        priority=Priority.LOW,
    ),
    Job(
        name="GenerateDailyBackupJob",
        title="Create database backups",
        cron="0 4 * * *",
        school=None,
        role="system",
        share=7,
        seconds=(120.0, 420.0),
        timeout=3600.0,
        payload={"target": "s3://backups/school", "secret_key": "b-02e6fd"},
        lines=("dumping 14 schemas", "{n} MB written", "checksum verified"),
        result="megabytes",
        fault=Fault(
            type="BackupError",
            message="checksum of part 12 differs from the one that was sent",
            place="backup.py:verify",
            line=97,
            code="raise BackupError(message)",
        ),
        priority=Priority.VERY_HIGH,
    ),
)
# Work that people ask for by themselves; the noisy user's is this as well.
IMPORT = Job(
    name="ImportStudentsJob",
    title="Import students from a spreadsheet",
    cron="",
    school=1,
    role="imports",
    share=0,
    seconds=(0.5, 12.0),
    timeout=60.0,
    payload={"file": "form-1.xlsx"},
    lines=("reading rows", "{n} students imported"),
    result="students",
    fault=Fault(
        type="UnicodeDecodeError",
        message="'utf-8' codec can't decode byte 0xe9 in position 2107",
        place="imports.py:read_rows",
        line=44,
        code="text = raw.decode()",
    ),
)
# What users may have, by the part of their name after the school: weights and limits.
USER_SETTINGS: dict[str, dict[str, Any]] = {
    "system": {"weight": 2.0},
    "bursar": {"weight": 3.0, "max_running": 4},
    "office": {"weight": 2.0},
    "admissions": {"weight": 1.0, "rate": 0.5},
    "transport": {"weight": 0.5, "max_running": 1},
    "imports": {"weight": 1.0, "max_waiting": 20_000},
}
# Schedules that were paused, how many days ago at least, and why.
PAUSES = {
    "ExpireWaitlistOffersJob": (8, "Admissions are closed until the new term"),
    "CleanupGpsLogsJob": (5, "Transport audit: keep all positions until it is over"),
}
