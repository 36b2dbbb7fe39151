"""Input preparation kernel against its plain form: in the interpreter, or on a GPU."""

import pytest
import torch

from forespark.serving.kernels.queries import prepare_queries_kernel
from forespark.serving.packed import PAD_SLOT_ID, Anchors, CacheGroup, QueryBuffers, prepare_queries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_TOKENS, MAX_REQUESTS, K, BLOCK, MASK, MAX_LEN = 700, 9, 7, 4, 99, 40
STALE = -7777  # fills the buffers first, as an earlier and larger batch would


def buffers(groups, lengths, device):
    def stale(size, dtype=torch.int64):
        return torch.full((size,), STALE, dtype=dtype, device=device)

    R = len(lengths)
    rng = torch.Generator().manual_seed(R)
    tables = [torch.randint(1, 60, (R, 10), generator=rng, dtype=torch.int32) for _ in groups]
    for table in tables:
        table[:, 8] = 0  # the null block
    made = [
        CacheGroup(table.to(device)[:, : 10 - index], size, stale(MAX_TOKENS))
        for index, (table, size) in enumerate(zip(tables, groups, strict=True))
    ]
    anchors = Anchors(
        row=torch.zeros(R, dtype=torch.int64),
        position=torch.randint(0, MAX_LEN - 1, (R,), generator=rng).to(device),
        token=torch.randint(0, 90, (R,), generator=rng).to(device),
    )
    inputs = QueryBuffers(
        stale(MAX_TOKENS, torch.int32), stale(MAX_TOKENS), stale(MAX_REQUESTS + 1, torch.int32),
        stale(MAX_REQUESTS, torch.int32), stale(MAX_TOKENS), MASK, MAX_LEN,
    )  # fmt: skip
    return anchors, inputs, made


FIELDS = ("start", "request", "offset", "draft_request", "draft_step", "draft_token")
INPUTS = ("input_ids", "positions", "query_start_loc", "seq_lens")


def both(lengths, num_tokens, num_drafts, groups=(BLOCK,)):
    """(kernel, plain), each a dict of every tensor that was written, on the CPU."""
    out = []
    for prepare, device in ((prepare_queries_kernel, DEVICE), (prepare_queries, "cpu")):
        anchors, inputs, made = buffers(groups, lengths, device)
        blocks = prepare(
            torch.tensor(lengths, dtype=torch.int64, device=device),
            anchors, num_tokens, num_drafts, K, inputs, made,
        )  # fmt: skip
        found = {name: getattr(blocks, name) for name in FIELDS}
        found |= {name: getattr(inputs, name) for name in INPUTS}
        found["conv_offsets"] = inputs.offsets[:num_tokens]
        found |= {f"slots {index}": group.slots for index, group in enumerate(made)}
        out.append({name: tensor.cpu() for name, tensor in found.items()})
    return out


def used(lengths):
    return sum(d + 1 for d in lengths if d)


@pytest.mark.parametrize(
    "lengths",
    [[3], [1], [7, 0, 1, 5], [0, 0, 2, 0], [7] * MAX_REQUESTS, [0, 1, 0, 1, 0, 1, 0, 1, 7]],
)
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_ragged_batches_equal_the_plain_form(lengths, spare):
    got, want = both(lengths, used(lengths) + spare, sum(lengths) + spare)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("bucket", [255, 256, 257])  # around one program's share of padding
def test_buckets_around_a_tile(bucket):
    got, want = both([2, 0, 4], bucket, 6)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_lengths_of_zero_leave_padding_only():
    got, want = both([0, 0, 0], 8, 2)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert got["query_start_loc"].tolist() == [0] * (MAX_REQUESTS + 1)


def test_groups_have_tables_and_block_sizes_of_their_own():
    got, want = both([5, 0, 7, 2], 20, 14, groups=(4, 3, 8))
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_padding_is_inert():
    """After a larger batch's leftovers: no slot, no query, no sequence, blocks of one token."""
    lengths, bucket = [3, 0, 2], 12
    got, _ = both(lengths, bucket, 9)
    tokens = used(lengths)
    assert (got["slots 0"][tokens:bucket] == PAD_SLOT_ID).all()
    assert (got["slots 0"][bucket:] == STALE).all(), "wrote past the bucket"
    assert (got["query_start_loc"][3:] == tokens).all()
    assert (got["seq_lens"][3:] == 0).all()
    assert (got["conv_offsets"][tokens:] == 0).all()
    assert (got["positions"][tokens:bucket] == 0).all()
    assert (got["draft_token"][5:] == 0).all()


def test_slot_zero_is_never_written_and_positions_stop_at_the_limit():
    got, _ = both([7] * MAX_REQUESTS, 8 * MAX_REQUESTS, 7 * MAX_REQUESTS)
    slots = got["slots 0"][: 8 * MAX_REQUESTS]
    assert ((slots >= BLOCK) | (slots == PAD_SLOT_ID)).all()
    assert (slots == PAD_SLOT_ID).any() and (got["positions"][: len(slots)] == MAX_LEN - 1).any()


def test_a_bucket_that_is_too_small_cuts_and_writes_nothing_past_it():
    anchors, inputs, made = buffers((BLOCK,), [7, 7], DEVICE)
    lengths = torch.tensor([7, 7], device=DEVICE)
    prepare_queries_kernel(lengths, anchors, 11, 12, K, inputs, made)
    assert (inputs.input_ids[11:] == STALE).all() and (made[0].slots[11:] == STALE).all()
    assert inputs.query_start_loc.tolist() == [0, 8] + [11] * (MAX_REQUESTS - 1)
    assert inputs.input_ids[:11].ne(STALE).all()
