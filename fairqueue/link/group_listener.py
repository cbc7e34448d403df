"""Wait for tokens in lists of several slots of a cluster, each on a connection of its own.

BLPOP takes the keys of one slot only. So there is one blocked connection for each slot, and one
`select` watches them all. The server is asked to wait for long: 64 partitions without tasks cost
some two commands per second.
"""

import random
import socket
import time
from typing import Protocol

import redis

from fairqueue.link.driver import BROKEN
from fairqueue.link.listener import Ear, Lender, Waiter, readable

# The server answers BLPOP after this long in any case; see BLOCK_S for one that does not.
GROUP_BLOCK_S = 30.0
# Seconds before a slot is asked again after a failure: at first, and at most.
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
AT_ONCE = 3  # how often in a row a listener follows a slot to another node without a pause

LATER = (*BROKEN, redis.ResponseError)


class Splitter(Protocol):
    """The way to the slots of a cluster."""

    def by_slot(self, keys: tuple[bytes, ...]) -> dict[int, tuple[Lender, tuple[bytes, ...]]]:
        """Where to wait for these keys, and for which of them, for each slot."""


class SlotEar(Ear):
    """The connection for one slot, which comes back by itself."""

    def __init__(self, lender: Lender, keys: tuple[bytes, ...]) -> None:
        super().__init__(lender, keys)
        self.retry_at = 0.0
        self._pause = 0.0
        self._moves = 0

    @property
    def node(self) -> str | None:
        """The node that has the lists, as far as is known."""
        return self._lender.name

    def heard(self) -> None:
        """The server has answered: the next failure is the first one."""
        self._pause, self._moves = 0.0, 0

    def back_off(self, error: Exception) -> None:
        """Ask again later, or at once after the first moves."""
        cause = error.__cause__ or error
        if isinstance(cause, redis.exceptions.MovedError) and self._moves < AT_ONCE:
            self._moves += 1
            return
        self._pause = min(max(2 * self._pause, FIRST_BACKOFF_S), LONGEST_BACKOFF_S)
        self.retry_at = time.monotonic() + self._pause * random.uniform(0.5, 1.0)  # noqa: S311


class GroupListener(Waiter):
    """Waits for a token in lists of a cluster. A broken node affects only its own lists."""

    def __init__(self, splitter: Splitter, *keys: bytes) -> None:
        super().__init__()
        self._splitter = splitter
        self._keys: tuple[bytes, ...] = ()
        self._ears: dict[int, SlotEar] = {}
        self.listen_to(*keys)

    def listen_to(self, *keys: bytes) -> None:
        """Wait for tokens in these lists from now on."""
        if keys == self._keys:
            return
        self._keys = keys
        wanted = self._splitter.by_slot(keys)
        for slot, ear in list(self._ears.items()):
            if slot not in wanted or wanted[slot][1] != ear.keys:
                ear.forget()
                del self._ears[slot]
        for slot, (lender, own) in wanted.items():
            if slot not in self._ears:
                self._ears[slot] = SlotEar(lender, own)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True if a token came or another thread ended the wait.

        If a token came, `token_from` is the list that had it, and None otherwise.
        Nodes that fail are asked again later. Raises redis errors only for refusals that would be
        repeated. BLPOPs stay pending until `forget`.
        """
        self.token_from = None
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        for ear in self._ears.values():
            ear.leave_if_elsewhere()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            due = self._ask()
            ready = self._ready(min(left, due))
            for ear in ready:
                if self._heard(ear):
                    return True
            if self._woken(readable([self._awake], 0)):
                return True
        return False

    def _ask(self) -> float:
        """Ask wherever nothing is pending; seconds until there is something to do again.

        One failure ends it: connecting may take long, and tokens may have come meanwhile.
        """
        due = float("inf")
        for ear in self._ears.values():
            now = time.monotonic()
            if ear.is_pending and now >= ear.answers_by:
                ear.forget()
                ear.back_off(redis.TimeoutError("no answer to BLPOP"))
            if not ear.is_pending and now >= ear.retry_at:
                try:
                    ear.ask(GROUP_BLOCK_S)
                except LATER as error:
                    self._failed(ear, error)
                    return 0.0
            due = min(due, (ear.answers_by if ear.is_pending else ear.retry_at) - now)
        return max(due, 0.0)

    def _ready(self, seconds: float) -> list[SlotEar]:
        """Wait for a server, another thread or the time; the ears with something to read."""
        pending = [(ear, ear.sock) for ear in self._ears.values() if ear.is_pending]
        socks = {sock: ear for ear, sock in pending if sock is not None}
        if decrypted := [ear for sock, ear in socks.items() if _has_decrypted(sock)]:
            return decrypted
        ready = readable([*socks, self._awake], seconds)
        return [socks[sock] for sock in ready if sock in socks]

    def _heard(self, ear: SlotEar) -> bool:
        """Read an answer; True for a token."""
        try:
            answer = ear.read()
        except LATER as error:
            self._failed(ear, error)
            return False
        if not ear.is_pending:
            ear.heard()
        if answer is not None:
            self.token_from = answer[0]
        return answer is not None

    def _failed(self, ear: SlotEar, error: Exception) -> None:
        """Ask again later, unless the refusal would be repeated."""
        if isinstance(error, redis.ResponseError) and not isinstance(error, BROKEN):
            raise error
        ear.back_off(error)
        # One attempt is enough to find out whether a node is back: a frozen one takes long to fail.
        for other in self._ears.values():
            if not other.is_pending and other.node == ear.node:
                other.retry_at = max(other.retry_at, ear.retry_at)

    def wait_for_nudge(self, seconds: float) -> bool:
        """Wait for another thread only. Tokens that come meanwhile are put back for others.

        Connections stay as they are: to make 64 new ones for each task would cost more. Where a
        token has come, the server is not asked again until the next `wait`.
        """
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for ear in self._ready(left):
                _hand_back(ear)
            if self._woken(readable([self._awake], 0)):
                return True
        return False

    def forget(self) -> None:
        """Give up all pending BLPOPs, so that tokens go to other clients."""
        for ear in self._ears.values():
            ear.forget()

    def _release(self) -> None:
        for ear in self._ears.values():
            ear.release()


def _hand_back(ear: SlotEar) -> None:
    """Put a token that has come back for others."""
    try:
        answer = ear.read()
        if answer is not None:
            ear.push_back(answer)
    except LATER as error:
        ear.back_off(error)


def _has_decrypted(sock: socket.socket) -> bool:
    """Whether TLS has read more than was asked for: the socket does not show that."""
    pending = getattr(sock, "pending", None)
    return pending is not None and pending() > 0
