"""A drafter's query batch in packed blocks of different lengths, over vLLM's own buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from forespark.serving import packed
from forespark.serving.conv import BlockOffsets
from forespark.serving.proposal import Proposal

# Attention backends that read ``query_start_loc`` of a batch on the device, and of the host's
# copy the longest query and the end only. Context parallelism reads all of the host's copy.
DEVICE_LENGTHS = {"FLASH_ATTN", "TRITON_ATTN"}


class PackedBlocks(DFlashSpeculator):
    """Context K/V and query batch of a DFlash-family drafter; see ``packed`` for the layout.

    Attributes:
        offsets: each query token's place in its block.
    """

    offsets: BlockOffsets

    def reads_device_lengths(self) -> bool:
        """Whether the drafter's attention takes block boundaries from the device alone."""
        backends = {g.backend.get_name() for groups in self.attn_groups for g in groups}
        return backends <= DEVICE_LENGTHS and self.block_tables.cp_size == 1

    def _store_context(
        self, input_batch: Any, context: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Write the drafter's context K/V of the target's new tokens, per cache group."""
        num_reqs, num_tokens = input_batch.num_reqs, context.shape[0]
        positions = input_batch.positions[:num_tokens]
        slots = [
            packed.context_slots(
                input_batch.query_start_loc[: num_reqs + 1],
                positions,
                num_rejected,
                self.block_tables.input_block_tables[group][:num_reqs],
                self.block_tables.kernel_block_sizes[group],
            )
            for group in self.draft_kv_cache_group_ids
        ]
        layers = self._layer_group_idx
        per_layer = slots[0] if layers is None else [slots[index] for index in layers]
        self.model.precompute_and_store_context_kv(context, positions, per_layer)

    def _prepare_queries(
        self, input_batch: Any, anchors: packed.Anchors, proposal: Proposal
    ) -> tuple[packed.Blocks, dict[str, torch.Tensor], dict[str, Any] | None]:
        """Fill the query buffers; lay out blocks, slot mappings and attention metadata."""
        num_reqs, num_tokens = input_batch.num_reqs, proposal.num_tokens
        blocks = packed.prepare_queries(
            proposal.lengths, anchors, num_tokens, proposal.num_drafts,
            self.num_speculative_steps, self._query_buffers(), self._cache_groups(num_reqs),
        )  # fmt: skip
        self.draft_max_seq_len = min(
            int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max()) + self.num_query_per_req,
            self.max_model_len,
        )
        starts = self._starts_on_host(proposal, num_reqs)
        metadata = self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs
            ),
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
            step=self.num_query_per_req,
            causal=self._group_causal,
        )
        mappings = build_slot_mappings_by_layer(
            self.block_tables.slot_mappings[:, :num_tokens], self.kv_cache_config
        )
        return blocks, mappings, metadata

    def _starts_on_host(self, proposal: Proposal, num_reqs: int) -> np.ndarray:
        """[R + 1] int32 first token of each block, as far as the host knows.

        Where the device chose the lengths: full blocks until the tokens are used up. Only the
        end and the longest block are read of that, by attention that takes its boundaries
        from the device.
        """
        if proposal.lengths_host is None:
            starts = np.arange(num_reqs + 1, dtype=np.int32) * self.num_query_per_req
            return np.minimum(starts, proposal.num_tokens)
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        widths = np.where(proposal.lengths_host > 0, proposal.lengths_host + 1, 0)
        np.cumsum(widths, out=starts[1:])
        return starts

    def _query_buffers(self) -> packed.QueryBuffers:
        buffers = self.input_buffers
        return packed.QueryBuffers(
            buffers.input_ids, buffers.positions, buffers.query_start_loc, buffers.seq_lens,
            self.offsets.rows, self.parallel_drafting_token_id, self.max_model_len,
        )  # fmt: skip

    def _cache_groups(self, num_reqs: int) -> list[packed.CacheGroup]:
        tables = self.block_tables
        return [
            packed.CacheGroup(
                tables.input_block_tables[group][:num_reqs],
                tables.kernel_block_sizes[group],
                tables.slot_mappings[group],
            )
            for group in self.draft_kv_cache_group_ids
        ]
