"""Packed layout: blocks of different lengths, anchors, cache slots."""

import pytest
import torch

from forespark.serving import packed

CASES = [[3, 0, 1], [0, 0, 2], [7], [0], [1, 1, 1, 1], [0, 5, 0, 0, 2, 0]]


@pytest.mark.parametrize("lengths", CASES)
def test_layout_matches_a_loop(lengths):
    widths = [d + 1 if d else 0 for d in lengths]
    blocks = packed.lay_out(torch.tensor(lengths), sum(widths), sum(lengths))
    tokens = [(r, o) for r, w in enumerate(widths) for o in range(w)]
    drafts = [(r, s) for r, d in enumerate(lengths) for s in range(d)]
    assert list(zip(blocks.request.tolist(), blocks.offset.tolist(), strict=True)) == tokens
    found = zip(blocks.draft_request.tolist(), blocks.draft_step.tolist(), strict=True)
    assert list(found) == drafts
    assert blocks.start.tolist() == [sum(widths[:r]) for r in range(len(lengths) + 1)]
    assert blocks.draft_token.tolist() == [tokens.index((r, s + 1)) for r, s in drafts]


@pytest.mark.parametrize("lengths", [*CASES, [0, 0]])
def test_inputs_match_a_loop_and_padding_is_inert(lengths):
    R, drafts, bucket, limit = len(lengths), sum(lengths), 12, 11
    used = sum(d + 1 for d in lengths if d)
    position, token = torch.arange(R) + 4, torch.arange(R) + 30
    table = torch.arange(1, 3 * R + 1).view(R, 3)
    stale = lambda size: torch.full((size,), -5)  # noqa: E731
    buffers = packed.QueryBuffers(*(stale(14) for _ in range(5)), 99, limit)
    group = packed.CacheGroup(table, 4, stale(14))
    blocks = packed.prepare_queries(
        torch.tensor(lengths), packed.Anchors(stale(R), position, token), bucket, drafts + 1, 7,
        buffers, [group],
    )  # fmt: skip
    want = []
    for r, d in enumerate(lengths):
        for offset in range(d + 1 if d else 0):
            at = 5 + r + offset
            slot = int(table[r, at // 4]) * 4 + at % 4 if at < limit else packed.PAD_SLOT_ID
            want.append((99 if offset else 30 + r, min(at, limit - 1), offset, slot))
    want += [(99, 0, 0, packed.PAD_SLOT_ID)] * (bucket - used)
    found = (buffers.input_ids, buffers.positions, buffers.offsets, group.slots)
    assert list(zip(*(part[:bucket].tolist() for part in found), strict=True)) == want
    assert group.slots[bucket:].tolist() == [-5] * (14 - bucket)
    assert buffers.query_start_loc.tolist()[R:] == [used] * (14 - R)
    ends = [min(6 + r + d, limit) for r, d in enumerate(lengths)]
    assert buffers.seq_lens.tolist() == ends + [0] * (14 - R)
    assert blocks.draft_token.tolist()[drafts:] == [0] and len(blocks.request) == bucket


def test_anchor_is_after_the_last_accepted_token():
    # Request 0 verified two drafts and rejected one, request 1 is still prefilling.
    anchors = packed.find_anchors(
        query_start_loc=torch.tensor([0, 3, 7], dtype=torch.int32),
        positions=torch.tensor([10, 11, 12, 0, 1, 2, 3]),
        idx_mapping=torch.tensor([4, 2], dtype=torch.int32),
        num_sampled=torch.tensor([2, 0]),
        num_rejected=torch.tensor([1, 0]),
        last_sampled=torch.arange(100, 106).view(6, 1),
        next_prefill=torch.arange(200, 206).view(1, 6),
    )
    assert anchors.row.tolist() == [1, 6]
    assert anchors.position.tolist() == [11, 3]
    assert anchors.token.tolist() == [104, 202]


def test_slots_stay_out_of_the_null_block_and_past_the_table():
    table = torch.tensor([[5, 0], [7, 9]])
    positions = torch.tensor([0, 3, 4, 5, 1, 8])
    request = torch.tensor([0, 0, 0, 1, 1, 1])
    valid = torch.tensor([True, True, True, True, False, True])
    slots = packed.slots_of(positions, request, table, 4, valid)
    pad = packed.PAD_SLOT_ID
    assert slots.tolist() == [20, 23, pad, 9 * 4 + 1, pad, pad]


def test_rejected_tokens_write_no_context():
    slots = packed.context_slots(
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        positions=torch.tensor([0, 1, 2, 6]),
        num_rejected=torch.tensor([2, 0]),
        block_table=torch.tensor([[1, 2], [3, 4]]),
        block_size=4,
    )
    assert slots.tolist() == [4, packed.PAD_SLOT_ID, packed.PAD_SLOT_ID, 18]
