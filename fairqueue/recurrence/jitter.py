"""Delays of fires, so that schedules with the same fire time do not all start at once."""

import hashlib

_RANGE_BITS = 64


def jitter_ms(seed: str, moment_ms: int, most_ms: int, next_ms: int | None) -> int:
    """Return the delay of a fire in milliseconds: from 0 to `most_ms`, evenly distributed.

    It depends only on the seed, such as the id of the schedule, and on the fire time, so every
    scheduler gets the same delay. It ends before the next fire time (`next_ms`, or None), so that
    the order of fires stays.
    """
    room = most_ms if next_ms is None else min(most_ms, next_ms - moment_ms - 1)
    if room <= 0:
        return 0
    text = f"{moment_ms}/{seed}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=_RANGE_BITS // 8).digest()
    return int.from_bytes(digest, "big") * (room + 1) >> _RANGE_BITS
