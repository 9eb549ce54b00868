"""Slots for sequences: they limit how many sequences run or wait, over all processes that serve HTTP."""

from __future__ import annotations

from inferplane.serving.errors import queue_full
from inferplane.serving.keys import AccessKey
from inferplane.serving.shared_state.counters import SLOTS_CELL
from inferplane.serving.shared_state.key_usage import KeyUsage
from inferplane.serving.shared_state.shared_counters import SharedCounters


class SequenceSlots:
    """Counts the sequences that run or wait, and refuses the one too many at once.

    Args:
        max_sequences: most sequences at a time.
        shared: the counters shared with other processes over the same engine; None without other processes.
        process: this process's row in `shared`.
        usage: what each key uses; None: for this process alone, and without shares.
    """

    def __init__(
        self,
        max_sequences: int,
        shared: SharedCounters | None = None,
        process: int = 0,
        usage: KeyUsage | None = None,
    ) -> None:
        self.usage = usage or KeyUsage()
        self.max_sequences, self._own, self._shared, self._process = max_sequences, 0, shared, process
        self._publish()

    @property
    def in_use(self) -> int:
        """Slots in use, over all processes."""
        return self._own if self._shared is None else self._shared.sum(SLOTS_CELL)

    def acquire(self, count: int, key: AccessKey | None = None) -> None:
        """Acquire slots for a request, which has a key if there are keys.

        Raises:
            ApiError: 429, fewer slots are free, or the key has used its shares.
        """
        in_use = self.in_use
        if in_use + count > self.max_sequences:
            raise queue_full(f"{in_use} sequences are being served or wait, of at most {self.max_sequences}")
        self.usage.acquire(key, count)
        self._own += count
        self._publish()

    def release(self, count: int, key: AccessKey | None = None) -> None:
        """Release slots that were acquired with this key."""
        self.usage.release(key, count)
        self._own -= count
        self._publish()

    def _publish(self) -> None:
        if self._shared is not None:
            self._shared.write(self._process, SLOTS_CELL, self._own)


class SlotReservation:
    """One slot, acquired for a request before its number of sequences is known.

    Args:
        slots: where to acquire it.
        key: of the request, if there are keys.

    Raises:
        ApiError: 429, no slot is free.
    """

    def __init__(self, slots: SequenceSlots, key: AccessKey | None = None) -> None:
        slots.acquire(1, key)
        self._slots, self._key, self._held = slots, key, 1

    def transfer(self) -> int:
        """Pass the slot to the caller, who releases it from now on.

        Returns:
            The number of slots passed on: 1, or 0 after an earlier transfer.
        """
        held, self._held = self._held, 0
        return held

    def release(self) -> None:
        """Release the slot, unless it was transferred."""
        self._slots.release(self.transfer(), self._key)
