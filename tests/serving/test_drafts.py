"""What the host may say of drafts whose lengths the device chose."""

import numpy as np
import pytest
import torch

from forespark.serving.drafts import DraftLengths
from forespark.serving.mailbox import Mailbox

CPU = torch.device("cpu")
SLOTS, K = 6, 4


class Late:
    """An event that passes when told to."""

    def __init__(self):
        self.passed = False

    def record(self):
        self.passed = False

    def query(self):
        return self.passed


@pytest.fixture
def late():
    """Lengths whose copies land when the test says so, and their events."""
    events, drafts = [], DraftLengths(SLOTS, CPU)

    def event():
        events.append(Late())
        return events[-1]

    drafts.box = Mailbox(SLOTS, 2, CPU, make_event=event)
    return drafts, events


def land(events):
    for event in events:
        event.passed = True


def send(drafts, slots, lengths, guess, room):
    drafts.send(
        np.array(slots), torch.tensor(lengths), np.array(guess), np.array(room), sum(lengths)
    )


def present(drafts, slots, scheduled):
    limits, certain = drafts.present(np.array(slots), np.array(scheduled))
    return limits.tolist(), certain


def test_known_lengths_are_exact():
    drafts = DraftLengths(SLOTS, CPU)
    drafts.put(np.array([4, 1]), np.array([3, 2]))
    assert present(drafts, [1, 4, 0], [K, 2, K]) == ([2, 2, 0], 4)
    drafts.forget(1)
    assert present(drafts, [1, 4], [K, K]) == ([0, 3], 3)


def test_before_they_land_the_total_is_certain_and_after_it_each_length(late):
    drafts, events = late
    send(drafts, [4, 1, 2], [4, 0, 1], guess=[2, 2, 1], room=[4, 4, 4])
    assert present(drafts, [1, 2, 4], [K, K, K]) == ([2, 1, 2], 5)
    land(events)
    assert present(drafts, [1, 2, 4], [K, K, K]) == ([0, 1, 4], 5)


def test_who_left_or_was_cut_may_have_held_all_it_had_room_for(late):
    drafts, _ = late
    send(drafts, [4, 1, 2], [4, 0, 1], guess=[2, 2, 1], room=[4, 1, 4])
    assert present(drafts, [4, 2], [K, K])[1] == 4, "slot 1 had room for one"
    assert present(drafts, [4, 1, 2], [K, K, 2])[1] == 3, "two of four may be cut"
    drafts.forget(4)  # a new request in the slot, with nothing drafted
    assert present(drafts, [4, 1, 2], [K, K, K]) == ([0, 2, 1], 1)


def test_lengths_of_an_older_proposal_are_not_taken_for_newer_ones(late):
    drafts, events = late
    send(drafts, [0, 1], [3, 1], guess=[2, 2], room=[4, 4])
    send(drafts, [0, 1], [0, 2], guess=[1, 1], room=[4, 4])
    events[-1].passed = True  # buffers are taken from the end: the older copy
    assert present(drafts, [0, 1], [K, K]) == ([1, 1], 2)
    land(events)
    assert present(drafts, [0, 1], [K, K]) == ([0, 2], 2)
    drafts.put(np.array([0]), np.array([4]))
    assert present(drafts, [0, 1], [K, K]) == ([4, 2], 6)


@pytest.mark.parametrize("seed", range(50))
def test_what_is_certain_is_there(seed):
    """Random proposals, departures and cuts, copies that land late or never."""
    rng = np.random.default_rng(seed)
    events, drafts = [], DraftLengths(SLOTS, CPU)

    def event():
        events.append(Late())
        return events[-1]

    drafts.box = Mailbox(SLOTS, 2, CPU, make_event=event)
    truth = np.zeros(SLOTS, dtype=np.int64)
    for _ in range(30):
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        room = rng.integers(0, K + 1, len(slots))
        lengths = rng.integers(0, room + 1)
        if rng.random() < 0.2:
            drafts.put(slots, lengths)
        else:
            guess = rng.permutation(lengths)
            drafts.send(slots, torch.from_numpy(lengths), guess, room, int(lengths.sum()))
        truth[slots] = lengths
        for slot in np.flatnonzero(rng.random(SLOTS) < 0.15):
            drafts.forget(int(slot))
            truth[slot] = 0
        for one in events:
            one.passed |= rng.random() < 0.4
        asked = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        scheduled = np.where(rng.random(len(asked)) < 0.8, K, rng.integers(0, K + 1, len(asked)))
        limits, certain = drafts.present(asked, scheduled)
        there = np.minimum(truth[asked], scheduled)
        assert 0 <= certain <= there.sum()
        if drafts._exact[asked].all():
            assert np.array_equal(limits, there) and certain == there.sum()
