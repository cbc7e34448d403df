"""The plan of a schedule: which revision it has, and when it fires next."""

import re
from dataclasses import dataclass
from typing import ClassVar

from fairqueue.clock import LATEST_MS
from fairqueue.models import new_id

_MS = re.compile(rb"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it is stored: `<revision> <next fire time in ms>`, empty if there is none.

    Scripts compare the text: a caller that acts on a plan proves that nothing has changed. The
    revision is new with each change of the schedule or of its plan. It ends with a mark and a time
    if a user has set the next run.
    """

    MARK: ClassVar[bytes] = b"@"
    text: bytes

    @classmethod
    def read(cls, text: bytes | None) -> "Plan":
        """Wrap what Redis answers."""
        return cls(text or b"")

    @property
    def base(self) -> bytes:
        """The revision as it is stored, for scripts to compare."""
        return self.text.partition(b" ")[0]

    @property
    def revision(self) -> str:
        """The revision."""
        return self.base.decode(errors="replace")

    @property
    def nominal_ms(self) -> int | None:
        """The next fire time; None if there is none, or if it is malformed."""
        return _read_ms(self.text.partition(b" ")[2])

    @property
    def set_ms(self) -> int | None:
        """The next fire time that a user has set, rather than the rule; None if not set."""
        return _read_ms(self._mark)

    @property
    def is_set(self) -> bool:
        """Whether a user has set the next fire time."""
        return bool(self._mark)

    @property
    def is_pause(self) -> bool:
        """Whether the schedule is paused until a time, and is to resume then."""
        return self.text.endswith(b" -")

    @property
    def _mark(self) -> bytes:
        return self.base.partition(self.MARK)[2]

    def next_revision(self) -> str:
        """Return a new revision that keeps the fire time that a user has set."""
        mark = self._mark.decode(errors="replace")
        return f"{new_id()}{self.MARK.decode()}{mark}" if mark else new_id()

    @classmethod
    def new_revision(cls, set_ms: int | None = None) -> str:
        """Return a new revision; `set_ms` is the next fire time that a user sets."""
        return new_id() if set_ms is None else f"{new_id()}{cls.MARK.decode()}{set_ms}"


def _read_ms(text: bytes) -> int | None:
    if not _MS.fullmatch(text) or int(text) > LATEST_MS:
        return None
    return int(text)
