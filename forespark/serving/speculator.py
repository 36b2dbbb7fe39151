"""ForeSpark's speculator: DFlash 2 with planned, variable draft lengths."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from forespark.serving import packed
from forespark.serving.conv import use_packed_conv
from forespark.serving.planned import Chosen, PlannedDrafting
from forespark.serving.proposal import Proposal


class ForeSparkSpeculator(PlannedDrafting, DFlash2Speculator):
    """DFlash 2's grouped convolution and selector walk over packed blocks."""

    _speculator_name = "ForeSpark"

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        found = use_packed_conv(self.model, self.offsets)
        assert found > 0, "a DFlash 2 drafter has grouped convolutions"

    def choose(
        self,
        hidden: torch.Tensor,  # [M, d_h] of the draft positions
        input_batch: Any,
        anchors: packed.Anchors,
        blocks: packed.Blocks,
        proposal: Proposal,
        temperature: torch.Tensor,  # by request slot
        seeds: torch.Tensor,
    ) -> Chosen:
        """Selector walk over each position's candidates."""
        candidate_ids, unary = self.model.compute_candidates(hidden)
        slots = input_batch.idx_mapping.to(torch.int64)
        sampled = self.draft_logits is not None
        walked, logits = self.estimators.walk(
            hidden, candidate_ids, unary, anchors, blocks, proposal, temperature[slots],
            seeds[slots] if sampled else None,
        )  # fmt: skip
        return Chosen(walked.tokens, logits, (candidate_ids, walked.scores) if sampled else ())

    def keep_distribution(self, input_batch: Any, blocks: packed.Blocks, chosen: Chosen) -> None:
        """Only the candidates' columns of a row are finite: the old ones are taken back first."""
        if self.draft_logits is None:
            return
        candidate_ids, scores = chosen.drawn_from
        slot = input_batch.idx_mapping.to(torch.int64)[blocks.draft_request]
        step = blocks.draft_step
        rows = (slot[:, None], step[:, None])
        self.draft_logits[(*rows, self._cached_candidate_ids[slot, step])] = -torch.inf
        self.draft_logits[(*rows, candidate_ids)] = scores
        self._cached_candidate_ids[slot, step] = candidate_ids
