"""How often and when a failed task is tried again, and how long it may run: checked, and read back.

A handler has a policy, and a task may have one of its own, which its schedule or whoever pushes it
has given; each field of that wins over the handler's.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from fairqueue.errors import ConfigurationError, InvalidInput, InvalidTask, shown
from fairqueue.validation import check_count, check_number, check_seconds, encode_json

JITTERS = ("full", "none")
MAX_STEPS = 60  # the delay grows so often at most: beyond any cap, and more would overflow
MOST_MULTIPLIER = 100.0
MOST_ATTEMPTS = 1_000_000_000
MAX_DELAYS = 1000  # in a list
MAX_POLICY_BYTES = 32 * 1024  # more than so many delays take
# A backoff of a task's own is taken at its word: it is not cut off before a delay of a day.
OWN_CAP_S = 86_400.0


def check_backoff(value: object, error: type[InvalidInput]) -> float | list[float]:
    """Seconds before a retry, or a list of them."""
    if isinstance(value, list | tuple):
        if not value:
            raise error("backoff [] has no delay: give one for each retry")
        if len(value) > MAX_DELAYS:
            raise error(f"backoff has {len(value)} delays: at most {MAX_DELAYS}")
        return [check_seconds(each, "backoff", error) for each in value]
    return check_seconds(value, "backoff", error)


def check_multiplier(value: object, error: type[InvalidInput]) -> float:
    """By what each delay is multiplied to get the next one."""
    return check_number(value, "backoff_multiplier", error, least=1.0, most=MOST_MULTIPLIER)


def check_jitter(value: object, error: type[InvalidInput], name: str = "jitter") -> str:
    """How a delay is drawn."""
    if value not in JITTERS:
        raise error(f"{name} {shown(value)} is neither 'full' nor 'none'")
    return str(value)


def check_timeout(value: object, error: type[InvalidInput]) -> float:
    """How many seconds a run may take."""
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
    """What can be said of one task's retries and time-out; `Task.create` explains each."""

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
    """The policy of a task, from the fields that are not None; None if all are.

    Raises `error` naming the value, also when both `retries` and `max_attempts` are given.
    """
    unknown = [name for name in given if name not in _CHECKS]
    if unknown:
        raise error(f"unknown field {shown(unknown[0])}: known are {', '.join(_CHECKS)}")
    policy = {
        name: _CHECKS[name](value, error) for name, value in given.items() if value is not None
    }
    if "retries" in policy and "max_attempts" in policy:
        raise error(
            f"retries {policy['retries']} and max_attempts {policy['max_attempts']} are both "
            "given: pass one of them; max_attempts counts the first attempt too"
        )
    return policy or None


def encode_policy(policy: Mapping[str, Any] | None) -> str | None:
    """A policy as a task's document has it, JSON; None if there is none."""
    return encode_json(policy, "policy", MAX_POLICY_BYTES) if policy else None


def status_fields(policy: Mapping[str, Any] | None) -> str:
    """What the scripts have to know of a policy, as fields of a status, JSON.

    A policy that was read back may hold anything: what cannot be is left out.
    """
    text = ""
    for name, stored, scale in (("timeout", "timeout_ms", 1000), ("max_attempts", None, 1)):
        value = (policy or {}).get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12:
            text += f',"{stored or name}":{max(1, round(value * scale))}'
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and when a task that failed is offered again.

    retries: how many times after the first attempt. backoff: seconds before the first retry, which
    are multiplied by `multiplier` each time, up to `cap`; or a list, one delay for each retry, the
    last one repeated. jitter: "full" draws a delay between 0 and that, "none" takes it as it is.
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
        """A policy, checked. Raises ConfigurationError naming the value."""
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
        """The same, with what a task's own policy says of it.

        A `backoff` of a task's own is taken at its word: what else would change its delays (cap,
        jitter, multiplier) is the task's too, or the usual: no jitter, doubled, up to a day.
        Raises ConfigurationError for what was stored and cannot be used.
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
        """Seconds until the next attempt after this one failed, or None: there is no other."""
        if attempt > self.retries:
            return None
        if isinstance(self.backoff, tuple):
            delay = self.backoff[min(attempt, len(self.backoff)) - 1]
        else:
            grown = self.backoff * self.multiplier ** min(attempt - 1, MAX_STEPS)
            delay = min(self.cap, grown)
        return delay if self.jitter == "none" else random.uniform(0, delay)  # noqa: S311 - jitter
