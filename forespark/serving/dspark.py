"""DSpark as a fair baseline, and under work-conserving speculation.

Stock vLLM ranks and prices DSpark's drafts by raw confidences. The paper calibrates them
with per-position temperatures like ForeSpark's (Appendix B), which vLLM has no place for,
so the temperatures are applied where the budget manager receives the confidences.

A directional DSpark, whose blocks are causal and laid out as DFlash 2's, is also served with
planned lengths (Appendix G): the pre-draft estimator has one row, and the confidence head is
the post-draft estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from forespark.serving import packed
from forespark.serving.planned import Chosen, PlannedDrafting
from forespark.serving.proposal import Proposal
from forespark.serving.wrap import wrap


def temper(
    probabilities: torch.Tensor,  # [R, K] in [0, 1]
    theta: torch.Tensor,  # [K] > 0
) -> torch.Tensor:
    """sigmoid(logit(p) / theta), float32; 0 and 1 stay what they are."""
    return torch.sigmoid(torch.logit(probabilities.float()) / theta)


def calibrate_confidences(manager: Any, theta: Sequence[float]) -> None:
    """Let a stock budget manager see tempered confidences."""
    temperatures = torch.tensor(theta, dtype=torch.float32)

    def record(original: Callable[..., None], confidences: torch.Tensor, batch: Any) -> None:
        original(temper(confidences, temperatures.to(confidences.device)), batch)

    wrap(manager, "record_confidences", record)


def verify_everything(manager: Any) -> None:
    """Make a stock manager verify all drafts: steps of any size cost the same."""
    draft, verify = manager.cost_tables
    manager.cost_tables = (np.zeros_like(draft), np.ones_like(verify))


class PlannedDSpark(PlannedDrafting, DSparkSpeculator):
    """DSpark's Markov walk over packed blocks of planned lengths."""

    _speculator_name = "DSpark with planned lengths"
    # Each step of the walk holds the requests that are still drafting: shapes by lengths.
    splits_on_device = False

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        # A block is laid out as DFlash 2's: the anchor in a slot of its own.
        assert not self.sample_from_anchor, "a directional DSpark does not sample from its anchor"
        assert all(self.model.get_draft_attn_causal()), "a directional DSpark has causal blocks"

    def choose(
        self,
        hidden: torch.Tensor,  # [M, d_h] of the draft positions
        input_batch: Any,
        anchors: packed.Anchors,
        blocks: packed.Blocks,
        proposal: Proposal,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> Chosen:
        """Left to right, all requests side by side: each token biases the next one's logits.

        vLLM's own sampler draws, and stores what it drew from. Temperatures and seeds are in
        its buffers already.
        """
        logits = self.model.compute_draft_logits(hidden)  # [M, V]
        slots = input_batch.idx_mapping
        tokens = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        embeddings = torch.zeros(
            hidden.shape[0], self.estimators.post.w.numel() - hidden.shape[1],
            dtype=torch.float32, device=hidden.device,
        )  # fmt: skip
        first = torch.cumsum(proposal.lengths, 0) - proposal.lengths
        previous = anchors.token.clone()
        lengths = proposal.on_host()
        for step in range(int(lengths.max())):
            live = torch.from_numpy(np.flatnonzero(lengths > step)).to(hidden.device)
            rows = first[live] + step
            embedding = self.model.markov_embed(previous[live])
            biased = logits[rows] + self.model.markov_bias(embedding)
            position = anchors.position[live] + 2 + step  # of the token that is drawn
            drawn = self._sample_logits(biased, slots[live], position, step).to(torch.int64)
            tokens[rows], embeddings[rows] = drawn, embedding.float()
            previous[live] = drawn
        return Chosen(tokens, self.estimators.post(hidden.float(), embeddings), ())

    def keep_distribution(self, input_batch: Any, blocks: packed.Blocks, chosen: Chosen) -> None:
        """Nothing: the sampler did it."""
