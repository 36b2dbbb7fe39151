"""Clocks of the step meter: the host's where work is done when its call returns, else events.

A mark is a moment in the order of the device's work. On a GPU a step is only launched by
the host, so its marks are events, which are asked whether they have passed and, outside
the hot path, waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """What the meter needs of a clock."""

    def mark(self) -> Any:
        """This moment."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has come to ``mark``; never waits."""

    def wait(self, mark: Any) -> None:
        """Wait until the device has come to ``mark``."""

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds from one passed mark to a later one."""


class HostClock:
    """``time.perf_counter``; every mark has passed."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3


class DeviceClock:
    """Events on the current stream.

    Args:
        make_event: maker of timing events; None for CUDA's.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or (lambda: torch.cuda.Event(enable_timing=True))

    def mark(self) -> Any:
        event = self._make()
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))


def clock_of(device: torch.device) -> Clock:
    """The clock for work on ``device``."""
    return HostClock() if device.type == "cpu" else DeviceClock()
