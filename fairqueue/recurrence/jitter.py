"""How long a fire is put off, so that schedules of one moment do not all start at once."""

import hashlib

_RANGE_BITS = 64


def jitter_ms(seed: str, moment_ms: int, most_ms: int, next_ms: int | None) -> int:
    """How many milliseconds after its moment a schedule fires: from 0 to `most_ms`, evenly spread.

    The seed, such as the schedule's id, and the moment decide, so every scheduler that asks gets
    the same answer. It is never at or past the next moment, so the order of fires stays; a `most`
    that does not fit is cut to what does. `next_ms` is None where there is no next moment.
    """
    room = most_ms if next_ms is None else min(most_ms, next_ms - moment_ms - 1)
    if room <= 0:
        return 0
    text = f"{moment_ms}/{seed}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=_RANGE_BITS // 8).digest()
    return int.from_bytes(digest, "big") * (room + 1) >> _RANGE_BITS
