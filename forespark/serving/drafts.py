"""How many drafts each request slot holds, as far as the host knows.

Where the host splits a planned total over requests it knows every length. Where the device
splits, the host knows the total at once and the lengths only when a copy of them has landed.
Until then it has a guess (its own split by older scores), good enough to plan B, and a bound
that no guess enters: whatever the device chose, so many of the last proposal's drafts are
still there once some requests have left or had drafts cut. B stays within that bound, so
that the device always fills exactly B (paper, Section 4.4).
"""

from __future__ import annotations

import numpy as np
import torch

from forespark.serving.mailbox import Mailbox

TAGS = 1 << 20  # proposal numbers; a float32 holds each exactly


class DraftLengths:
    """See the module docstring.

    Args:
        slots: request-state slots.
        device: where lengths are chosen.
        lockstep: other ranks must know the same at the same step (``mailbox``).
    """

    def __init__(self, slots: int, device: torch.device, lockstep: bool = False) -> None:
        self.lengths = np.zeros(slots, dtype=np.int64)  # exact, or a guess
        self._exact = np.ones(slots, dtype=bool)
        self._tag_of = np.zeros(slots, dtype=np.int64)  # proposal that the slot's drafts are of
        self.box = Mailbox(slots, 2, device, lockstep=lockstep)
        self._tag = 0  # of the last proposal; 0 is none's
        # The last proposal that the device split: its slots, what each could get, the total.
        self._slots = np.zeros(0, dtype=np.int64)
        self._room = np.zeros(0, dtype=np.int64)
        self._total = 0

    def forget(self, slot: int) -> None:
        """The slot belongs to another request now, which has no draft."""
        self.lengths[slot], self._exact[slot], self._tag_of[slot] = 0, True, 0
        self.box.forget(slot)

    def put(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Drafts of known lengths [R] were made for ``slots`` [R]."""
        self.lengths[slots], self._exact[slots], self._tag_of[slots] = lengths, True, 0

    def send(
        self,
        slots: np.ndarray,  # [R]
        lengths: torch.Tensor,  # [R] on the device
        guess: np.ndarray,  # [R] what the host would have chosen
        room: np.ndarray,  # [R] the most that each could get
        total: int,  # their sum, exactly
    ) -> None:
        """Drafts of lengths that only the device knows were made; start bringing them here."""
        self._tag = self._tag % (TAGS - 1) + 1
        self.lengths[slots], self._exact[slots], self._tag_of[slots] = guess, False, self._tag
        self._slots, self._room, self._total = slots.copy(), room.astype(np.int64), total
        tag = torch.full_like(lengths, self._tag)
        self.box.send(slots, torch.stack([lengths, tag], dim=1).to(torch.float32))

    def present(self, slots: np.ndarray, scheduled: np.ndarray) -> tuple[np.ndarray, int]:
        """Drafts of ``slots`` [R] that can be verified when each may hold ``scheduled`` [R].

        Returns:
            Drafts of each, exact or guessed, and a number of them in all that is certain.
        """
        self._land()
        limits = np.minimum(self.lengths[slots], scheduled)
        if self._exact[slots].all():
            return limits, int(limits.sum())
        offered = np.zeros(len(self.lengths), dtype=np.int64)
        offered[slots] = scheduled
        # A slot that was forgotten, or is not asked for, may have held all it had room for.
        here = self._tag_of[self._slots] == self._tag
        kept = np.minimum(self._room, np.where(here, offered[self._slots], 0))
        certain = self._total - int((self._room - kept).sum())
        return limits, max(0, certain)

    def _land(self) -> None:
        """Take lengths that have landed and are still those of the slot's drafts."""
        self.box.receive()
        fresh = ~self._exact & self.box.known & (self.box.rows[:, 1] == self._tag_of)
        self.lengths[fresh] = self.box.rows[fresh, 0].astype(np.int64)
        self._exact |= fresh
