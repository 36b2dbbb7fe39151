"""CPU twins of the kernels that write, gather and look up KV-cache block tables.

vLLM hands these kernels addresses of tensors (one per KV-cache group), so the twins read
memory through such addresses; shapes follow from the strides passed beside them.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic

from forespark.serving.cpu.registry import twin

_BLOCK_TABLE = "vllm.v1.worker.gpu.block_table"
_BUFFER_UTILS = "vllm.v1.worker.gpu.buffer_utils"


@intrinsic
def address_as_pointer(typing_context, address):
    """An integer address as an untyped pointer, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@nb.njit(cache=True)
def _write_rows(num_writes, out, indices, starts, contents, cu_lens):
    begin = 0
    for write in range(num_writes):
        end = cu_lens[write]
        for i in range(end - begin):
            out[indices[write], starts[write] + i] = contents[begin + i]
        begin = end


@nb.njit(cache=True)
def _write_grouped(num_writes, addresses, strides, indices, starts, contents, cu_lens, groups):
    begin = 0
    for write in range(num_writes):
        end = cu_lens[write]
        group = groups[write]
        stride = strides[group]
        table = nb.carray(
            address_as_pointer(addresses[group]), (indices[write] + 1, stride), np.int32
        )
        for i in range(end - begin):
            table[indices[write], starts[write] + i] = contents[begin + i]
        begin = end


@twin(_BUFFER_UTILS, "_apply_write_kernel")
def apply_write(
    grid: tuple[int, ...],
    output: torch.Tensor,  # [rows, columns] or [rows]; grouped: uint64 addresses [groups]
    output_stride: int | torch.Tensor,  # grouped: row strides [groups]
    write_indices: torch.Tensor,  # [writes] row of each write
    write_starts: torch.Tensor,  # [writes] first column
    write_contents: torch.Tensor,  # [values]
    write_cu_lens: torch.Tensor,  # [writes] end of each write's values
    write_group_ids: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Write the staged changes into their rows, in order."""
    staged = (
        write_indices.numpy(),
        write_starts.numpy(),
        write_contents.numpy(),
        write_cu_lens.numpy(),
    )
    if MULTI_GROUP:
        assert isinstance(output_stride, torch.Tensor)
        assert write_group_ids is not None
        _write_grouped(
            grid[0], output.numpy(), output_stride.numpy(), *staged, write_group_ids.numpy()
        )
        return
    rows = output if output.dim() == 2 else output.view(-1, 1)
    _write_rows(grid[0], rows.numpy(), *staged)


@nb.njit(cache=True)
def _gather(groups, padded, index, sources, targets, strides, num_blocks, num_reqs):
    for group in range(groups):
        stride = strides[group]
        target = nb.carray(address_as_pointer(targets[group]), (padded, stride), np.int32)
        for row in range(padded):
            if row >= num_reqs:
                target[row, :] = 0
                continue
            slot = index[row]
            source = nb.carray(address_as_pointer(sources[group]), (slot + 1, stride), np.int32)
            for i in range(num_blocks[group, slot]):
                target[row, i] = source[slot, i]


@twin(_BLOCK_TABLE, "_gather_block_tables_kernel")
def gather_block_tables(
    grid: tuple[int, ...],  # (groups, padded batch)
    batch_idx_to_req_idx: torch.Tensor,  # [B]
    src_block_table_ptrs: torch.Tensor,  # [groups] addresses of int32 [R, blocks]
    dst_block_table_ptrs: torch.Tensor,  # [groups] addresses of int32 [R, blocks], written
    block_table_strides: torch.Tensor,  # [groups] blocks per row
    num_blocks: torch.Tensor,  # [groups, R]
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Block-table rows in batch order; rows past the batch become zero."""
    _gather(
        grid[0],
        grid[1],
        batch_idx_to_req_idx.numpy(),
        src_block_table_ptrs.numpy(),
        dst_block_table_ptrs.numpy(),
        block_table_strides.numpy(),
        num_blocks.numpy(),
        num_reqs,
    )


@nb.njit(cache=True)
def _slots(
    groups,
    num_reqs,
    max_tokens,
    index,
    starts,
    positions,
    tables,
    strides,
    kv_block_sizes,
    block_sizes,
    enabled,
    out,
    rank,
    ranks,
    interleave,
    pad,
):
    num_tokens = starts[num_reqs]
    for group in range(groups):
        out[group, num_tokens:max_tokens] = pad
        if not enabled[group]:
            out[group, starts[0] : num_tokens] = pad
            continue
        size = np.int64(block_sizes[group])
        virtual = np.int64(kv_block_sizes[group]) * ranks
        for row in range(num_reqs):
            slot = index[row]
            table = nb.carray(
                address_as_pointer(tables[group]), (slot + 1, strides[group]), np.int32
            )
            for token in range(starts[row], starts[row + 1]):
                position = np.int64(positions[token])
                if ranks > 1:
                    within = position % virtual
                    if within // interleave % ranks != rank:
                        out[group, token] = pad
                        continue
                    local = within // (interleave * ranks) * interleave + within % interleave
                    position = position // virtual * kv_block_sizes[group] + local
                out[group, token] = np.int64(table[slot, position // size]) * size + position % size


@twin(_BLOCK_TABLE, "_compute_slot_mappings_kernel")
def compute_slot_mappings(
    grid: tuple[int, ...],  # (groups, B + 1): the kernel's last program pads
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,  # [tokens]
    block_table_ptrs: torch.Tensor,  # [groups] addresses
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,  # [groups] tokens per KV-cache block
    kernel_block_sizes: torch.Tensor,  # [groups] tokens per attention block
    slot_mapping_enabled: torch.Tensor,  # [groups] bool
    slot_mappings: torch.Tensor,  # [groups, tokens] int64, written
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """KV-cache slot of every scheduled token; PAD_ID past the batch and on other ranks."""
    _slots(
        grid[0],
        grid[1] - 1,
        max_num_tokens,
        idx_mapping.numpy(),
        query_start_loc.numpy(),
        pos.numpy(),
        block_table_ptrs.numpy(),
        block_table_strides.numpy(),
        block_sizes.numpy(),
        kernel_block_sizes.numpy(),
        slot_mapping_enabled.numpy(),
        slot_mappings.numpy(),
        cp_rank,
        CP_SIZE,
        CP_INTERLEAVE,
        PAD_ID,
    )
