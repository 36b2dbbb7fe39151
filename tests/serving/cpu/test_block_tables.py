"""Block-table twins against vLLM's kernels: one and several groups, padding, many ranks."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from kernel_twins import beside
from vllm.v1.worker.gpu import block_table, buffer_utils

from forespark.serving.cpu import block_tables as twins

SLOTS, TOKENS = 5, 40
STARTS = {
    "ragged": [0, 7, 8, 20],
    "one": [0, 1],
    "empty": [0],
}


class PlainBuffer:
    """The CPU worker's buffer: the worker puts it in place of vLLM's pinned one."""

    def __init__(self, size, dtype):
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n=None):
        return self.cpu[:n] if n is not None else self.cpu


@pytest.fixture(autouse=True)
def _plain_buffers(monkeypatch):
    monkeypatch.setattr(buffer_utils, "UvaBuffer", PlainBuffer)


def tables(groups: int, **options) -> block_table.BlockTables:
    made = block_table.BlockTables(
        block_sizes=[8, 4, 8][:groups],
        max_num_reqs=SLOTS,
        max_num_batched_tokens=TOKENS,
        max_num_blocks_per_group=[6, 12, 6][:groups],
        device=torch.device("cpu"),
        kernel_block_sizes=[4, 4, 8][:groups],
        **options,
    )
    for slot in range(SLOTS):
        ids = [[10 * slot + i + 1 for i in range(3 + slot % 2)] for _ in range(groups)]
        made.append_block_ids(slot, tuple(ids), overwrite=True)
    return made


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("starts", list(STARTS.values()), ids=list(STARTS))
@pytest.mark.parametrize("padding", [0, 2])
def test_write_gather_and_slots(groups, starts, padding):
    num_reqs = len(starts) - 1
    index = torch.tensor([3, 0, 4][:num_reqs], dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(b - a) + 3 for a, b in zip(starts, starts[1:], strict=False)]
        or [torch.zeros(0)]
    ).long()
    with ExitStack() as stack:
        stack.enter_context(beside(buffer_utils.__name__, "_apply_write_kernel"))
        stack.enter_context(beside(block_table.__name__, "_compute_slot_mappings_kernel"))
        made = tables(groups, slot_mapping_enabled=[True, False, True][:groups])
        made.apply_staged_writes()
        made.append_block_ids(3, tuple([[77]] * groups), overwrite=False)
        made.apply_staged_writes()
        gathered = gather_both(made, index, num_reqs + padding)
        for group, table in enumerate(gathered):
            for row in range(num_reqs):
                blocks = int(made.num_blocks.np[group, index[row]])
                assert torch.equal(
                    table[row, :blocks], made.block_tables[group].gpu[index[row], :blocks]
                )
            assert not table[num_reqs:].any()
        query_starts = torch.tensor([*starts, starts[-1]], dtype=torch.int32)
        made.compute_slot_mappings(index, query_starts, positions, TOKENS)


def gather_both(made, index, padded) -> list[torch.Tensor]:
    """The kernel's and the twin's gathered tables; they write through addresses."""
    for table in made.input_block_tables:
        table.fill_(-5)
    if padded == 0:
        return []
    expected = [t.clone() for t in made.gather_block_tables(index, padded)]
    for table in made.input_block_tables:
        table.fill_(-5)
    twins.gather_block_tables(
        (made.num_kv_cache_groups, padded),
        index,
        made.block_table_ptrs,
        made.input_block_table_ptrs,
        made.block_table_strides,
        made.num_blocks.gpu,
        made.num_blocks.gpu.stride(0),
        index.shape[0],
        BLOCK_SIZE=1024,
    )
    for table, wanted in zip(made.input_block_tables, expected, strict=True):
        assert torch.equal(table[:padded], wanted)
    return expected


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("interleave", [1, 2])
def test_slots_of_one_rank_of_two(rank, interleave):
    with beside(block_table.__name__, "_compute_slot_mappings_kernel"):
        made = tables(1, cp_size=2, cp_rank=rank, cp_interleave=interleave)
        made.block_tables[0].apply_write()
        made.compute_slot_mappings(
            torch.tensor([3, 0], dtype=torch.int32),
            torch.tensor([0, 14, 20], dtype=torch.int32),
            torch.cat([torch.arange(14), torch.arange(6) + 9]),
            TOKENS,
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("columns", [None, 6])
def test_staged_writes(dtype, columns):
    with beside(buffer_utils.__name__, "_apply_write_kernel") as pairs:
        size = SLOTS if columns is None else (SLOTS, columns)
        staged = buffer_utils.StagedWriteTensor(size, dtype, torch.device("cpu"))
        staged.stage_write_elem(2, 5)
        if columns is not None:
            staged.stage_write(0, 2, [1, 2, 3, 4])
            staged.stage_write(2, 0, [9])
        staged.apply_write()
        staged.apply_write()  # nothing staged: no launch
        assert pairs["_apply_write_kernel"].launches == 1
