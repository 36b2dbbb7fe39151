"""Rows travelling to the host: never waited for, never torn, never of an old request."""

import numpy as np
import pytest
import torch

from forespark.serving.mailbox import Mailbox


class Event:
    """A device event that lands when the test says so; waiting for it is an error."""

    def __init__(self) -> None:
        self.landed = True

    def record(self) -> None:
        self.landed = False

    def query(self) -> bool:
        return self.landed

    def synchronize(self) -> None:
        raise AssertionError("the host waited for the device")


class Awaited(Event):
    """One that may be waited for, as ranks in lockstep do."""

    def synchronize(self) -> None:
        self.landed = True


def make(events: list[Event]) -> Mailbox:
    def event() -> Event:
        events.append(Event())
        return events[-1]

    return Mailbox(4, 2, torch.device("cpu"), make_event=event)


def test_on_a_cpu_rows_are_there_at_once():
    box = Mailbox(3, 2, torch.device("cpu"))
    assert box.send(np.array([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert box.rows.tolist() == [[3, 4], [0, 0], [1, 2]]
    assert box.known.tolist() == [True, False, True]


def test_rows_stay_old_until_they_land():
    events: list[Event] = []
    box = make(events)
    box.send(np.array([1]), torch.ones(1, 2))
    box.receive()
    assert not box.known.any() and box.rows.sum() == 0
    for event in events:
        event.landed = True
    box.receive()
    assert box.rows[1].tolist() == [1, 1] and box.known[1]


def test_a_third_batch_is_not_sent_while_two_are_in_flight():
    events: list[Event] = []
    box = make(events)
    slots = np.array([0])
    assert box.send(slots, torch.full((1, 2), 1.0))
    assert box.send(slots, torch.full((1, 2), 2.0))
    assert not box.send(slots, torch.full((1, 2), 3.0))
    for event in events:
        event.landed = True
    assert box.send(slots, torch.full((1, 2), 4.0))
    assert box.rows[0].tolist() == [2, 2], "the newest landed row, not the one in flight"


def test_a_reused_slot_refuses_the_row_of_the_old_request():
    events: list[Event] = []
    box = make(events)
    box.send(np.array([0, 1]), torch.tensor([[5.0, 5.0], [6.0, 6.0]]))
    box.forget(0)
    for event in events:
        event.landed = True
    box.receive()
    assert not box.known[0] and box.rows[0].tolist() == [0, 0]
    assert box.known[1] and box.rows[1].tolist() == [6, 6]


@pytest.mark.parametrize("asked", [0, 1, 5])
def test_in_lockstep_rows_are_one_batch_old_whenever_they_land(asked):
    """However often a rank looks, and whatever has landed: the same rows at the same step."""
    box = Mailbox(2, 1, torch.device("cpu"), Awaited, lockstep=True)
    slots, seen = np.array([0, 1]), []
    for step in range(4):
        assert box.send(slots, torch.full((2, 1), float(step)))
        for letter in box._flying:
            letter.event.landed = asked == 5
        for _ in range(asked):
            box.receive()
        seen.append((bool(box.known[0]), float(box.rows[0, 0])))
    assert seen == [(False, 0.0), (True, 0.0), (True, 1.0), (True, 2.0)]


def test_in_lockstep_a_reused_slot_refuses_the_row_of_the_old_request():
    box = Mailbox(2, 1, torch.device("cpu"), Awaited, lockstep=True)
    box.send(np.array([0, 1]), torch.tensor([[5.0], [6.0]]))
    box.forget(0)
    box.send(np.array([1]), torch.tensor([[7.0]]))
    assert box.known.tolist() == [False, True] and box.rows[:, 0].tolist() == [0, 6]
