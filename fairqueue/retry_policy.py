"""Retries and time-outs of tasks.

A handler has a policy. A task can have its own, set by its schedule or at the push; each field that
it sets overrides the handler's.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from fairqueue.errors import ConfigurationError, InvalidInput, InvalidTask, shown
from fairqueue.validation import check_count, check_number, check_seconds, encode_json

JITTERS = ("full", "none")
MAX_STEPS = 60  # growth steps of a delay: beyond any cap; more could overflow
MOST_MULTIPLIER = 100.0
MOST_ATTEMPTS = 1_000_000_000
MAX_DELAYS = 1000  # in a list
MAX_POLICY_BYTES = 32 * 1024  # MAX_DELAYS delays fit
# The cap of a backoff that a task sets without a cap.
OWN_CAP_S = 86_400.0


def check_backoff(value: object, error: type[InvalidInput]) -> float | list[float]:
    """Check the seconds before a retry, or a list of them."""
    if isinstance(value, list | tuple):
        if not 1 <= len(value) <= MAX_DELAYS:
            raise error(f"backoff must have 1 to {MAX_DELAYS} delays, not {len(value)}")
        return [check_seconds(each, "backoff", error) for each in value]
    return check_seconds(value, "backoff", error)


def check_multiplier(value: object, error: type[InvalidInput]) -> float:
    """Check the factor from one delay to the next."""
    return check_number(value, "backoff_multiplier", error, least=1.0, most=MOST_MULTIPLIER)


def check_jitter(value: object, error: type[InvalidInput], name: str = "jitter") -> str:
    """Check the kind of jitter, "full" or "none"."""
    if value not in JITTERS:
        raise error(f"{name} must be 'full' or 'none', not {shown(value)}")
    return str(value)


def check_timeout(value: object, error: type[InvalidInput]) -> float:
    """Check the longest duration of a run, in seconds."""
    return check_seconds(value, "timeout", error, least=0.001)


_CHECKS: dict[str, Callable[[Any, type[InvalidInput]], Any]] = {
    "retries": lambda value, error: check_count(value, "retries", error),
    "max_attempts": lambda value, error: check_count(
        value, "max_attempts", error, least=1, most=MOST_ATTEMPTS
    ),
    "backoff": check_backoff,
    "backoff_cap": lambda value, error: check_seconds(value, "backoff_cap", error),
    "backoff_multiplier": check_multiplier,
    "jitter": check_jitter,
    "timeout": check_timeout,
}


class TaskPolicy(TypedDict, total=False):
    """The policy fields of one task; `Task.create` explains them."""

    retries: int | None
    max_attempts: int | None
    backoff: float | Sequence[float] | None
    backoff_cap: float | None
    backoff_multiplier: float | None
    jitter: str | None
    timeout: float | None


def check_policy(
    given: Mapping[str, object], error: type[InvalidInput] = InvalidTask
) -> dict[str, Any] | None:
    """Return the fields that are not None, checked; None if all are None.

    Raises `error` naming the value, also if both `retries` and `max_attempts` are given.
    """
    unknown = [name for name in given if name not in _CHECKS]
    if unknown:
        raise error(f"unknown field {shown(unknown[0])}: must be one of {', '.join(_CHECKS)}")
    policy = {
        name: _CHECKS[name](value, error) for name, value in given.items() if value is not None
    }
    if "retries" in policy and "max_attempts" in policy:
        raise error(
            f"pass retries or max_attempts, not both (retries={policy['retries']}, "
            f"max_attempts={policy['max_attempts']}); max_attempts includes the first attempt"
        )
    return policy or None


def encode_policy(policy: Mapping[str, Any] | None) -> str | None:
    """Return a policy as JSON for the task's document, or None."""
    return encode_json(policy, "policy", MAX_POLICY_BYTES) if policy else None


def status_fields(policy: Mapping[str, Any] | None) -> str:
    """Return the part of a policy that the scripts need, as JSON fields of a status record.

    Invalid values, which a stored policy may have, are left out.
    """
    text = ""
    for name, stored, scale in (
        ("timeout", "timeout_ms", 1000),
        ("max_attempts", "max_attempts", 1),
    ):
        value = (policy or {}).get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12:
            text += f',"{stored}":{max(1, round(value * scale))}'
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number and the delays of the retries of a failed task.

    retries: attempts after the first one. backoff: seconds before the first retry, multiplied by
    `multiplier` for each further retry, up to `cap`; or a list with one delay for each retry, whose
    last one repeats. jitter: "full" draws a random delay between 0 and the computed one, "none"
    uses the computed one.
    """

    retries: int = 5
    backoff: float | tuple[float, ...] = 2.0
    cap: float = 60.0
    jitter: str = "full"
    multiplier: float = 2.0

    @classmethod
    def create(
        cls,
        retries: int,
        backoff: float | Sequence[float],
        cap: float,
        jitter: str,
        multiplier: float = 2.0,
    ) -> "RetryPolicy":
        """Return a checked policy. Raises ConfigurationError naming the value."""
        error = ConfigurationError
        delays = check_backoff(backoff, error)
        return cls(
            retries=check_count(retries, "retries", error),
            backoff=tuple(delays) if isinstance(delays, list) else delays,
            cap=check_seconds(cap, "backoff_cap", error),
            jitter=check_jitter(jitter, error),
            multiplier=check_multiplier(multiplier, error),
        )

    def under(self, own: Mapping[str, Any]) -> "RetryPolicy":
        """Return this policy overridden by the task's `own` policy.

        If the task sets `backoff`, the handler's cap, jitter and multiplier do not apply to it: the
        task's own do, or else no jitter, doubling, and a cap of one day. Raises ConfigurationError
        for invalid stored values.
        """
        retries = own.get("retries", self.retries)
        if "max_attempts" in own:
            retries = check_count(own["max_attempts"], "max_attempts", ConfigurationError) - 1
        usual = {
            "backoff": self.backoff,
            "backoff_cap": self.cap,
            "jitter": self.jitter,
            "backoff_multiplier": self.multiplier,
        }
        if "backoff" in own:
            first = own["backoff"]
            longest = first if isinstance(first, int | float) else 0.0
            usual |= {"jitter": "none", "backoff_cap": max(OWN_CAP_S, longest)}
            usual["backoff_multiplier"] = 2.0
        chosen = usual | {name: own[name] for name in usual if name in own}
        return RetryPolicy.create(
            retries,
            chosen["backoff"],
            chosen["backoff_cap"],
            chosen["jitter"],
            chosen["backoff_multiplier"],
        )

    def delay(self, attempt: int) -> float | None:
        """Return the seconds until the next attempt after this one failed; None if it was last."""
        if attempt > self.retries:
            return None
        if isinstance(self.backoff, tuple):
            delay = self.backoff[min(attempt, len(self.backoff)) - 1]
        else:
            grown = self.backoff * self.multiplier ** min(attempt - 1, MAX_STEPS)
            delay = min(self.cap, grown)
        return delay if self.jitter == "none" else random.uniform(0, delay)  # noqa: S311 - jitter
