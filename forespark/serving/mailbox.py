"""Rows of a device array on the host, without waiting for the device.

The device sends one row per request of the batch; the host reads whatever has landed. On
a CPU that is at once. On a GPU two pinned buffers alternate, each closed by an event that
is only ever asked, never waited for: while both are in flight a newer batch is not sent,
so the host's rows grow older but never torn. A slot that got a new request since its row
was sent refuses that row.

When copies land is each rank's own affair. Ranks that must plan alike are in lockstep: a
row is read exactly one batch after it was sent, and a copy that has not landed by then is
waited for. The device has at least a whole verification queued behind it at that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class _Letter:
    """One copy in flight: the buffer, which slots it is for, and their generations."""

    buffer: torch.Tensor
    event: Any
    slots: np.ndarray
    generation: np.ndarray


class Mailbox:
    """Newest landed rows by request-state slot.

    Args:
        slots: request-state slots.
        width: values of a row.
        device: where rows come from.
        make_event: maker of device events; None for the device's own.
        lockstep: rows become visible one batch after they were sent, on every rank alike.

    Attributes:
        rows: [slots, width] float32.
        known: [slots] bool, False until a row of the slot's current request has landed.
    """

    def __init__(
        self,
        slots: int,
        width: int,
        device: torch.device,
        make_event: Callable[[], Any] | None = None,
        lockstep: bool = False,
    ) -> None:
        self.rows = np.zeros((slots, width), dtype=np.float32)
        self.known = np.zeros(slots, dtype=bool)
        self._generation = np.zeros(slots, dtype=np.int64)
        self._flying: list[_Letter] = []
        self._free: list[tuple[torch.Tensor, Any]] = []
        self._lockstep = lockstep
        self._direct = device.type == "cpu" and make_event is None
        if not self._direct:
            pin = device.type == "cuda"
            events = [(make_event or torch.cuda.Event)() for _ in range(2)]
            self._free = [(torch.zeros(slots, width, pin_memory=pin), event) for event in events]

    def forget(self, slot: int) -> None:
        """The slot belongs to another request now."""
        self.known[slot] = False
        self._generation[slot] += 1

    def send(self, slots: np.ndarray, values: torch.Tensor) -> bool:
        """Start bringing ``values`` [R, width] of ``slots`` [R] to the host.

        Returns:
            False when both buffers are still in flight and nothing was sent.
        """
        if self._direct:
            self.rows[slots] = values.numpy()
            self.known[slots] = True
            return True
        if self._lockstep:
            self._take_previous()
        else:
            self.receive()
        if not self._free:
            return False
        buffer, event = self._free.pop()
        buffer[: len(slots)].copy_(values, non_blocking=True)
        event.record()
        self._flying.append(_Letter(buffer, event, slots.copy(), self._generation[slots]))
        return True

    def receive(self) -> None:
        """Take what has landed, oldest first; never waits. In lockstep, nothing."""
        while self._flying and not self._lockstep and self._flying[0].event.query():
            self._open(self._flying.pop(0))

    def _take_previous(self) -> None:
        """Take the batch sent before this one, landed or not: the same one on every rank."""
        while self._flying:
            letter = self._flying.pop(0)
            if not letter.event.query():
                letter.event.synchronize()
            self._open(letter)

    def _open(self, letter: _Letter) -> None:
        current = self._generation[letter.slots] == letter.generation
        kept = letter.slots[current]
        self.rows[kept] = letter.buffer[: len(letter.slots)].numpy()[current]
        self.known[kept] = True
        self._free.append((letter.buffer, letter.event))
