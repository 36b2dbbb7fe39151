"""DSpark, the paper's baseline, on the same rows and by the same loop.

A directional one, with causal blocks and a pre-draft estimator of one row trained alongside,
is what work-conserving speculation serves with DSpark (paper, Appendix G).
"""

from __future__ import annotations

import torch
from torch import nn

from forespark.models.base import (
    Drafter,
    LossOptions,
    LossRows,
    length_metrics,
    pre_draft_estimator,
    spread,
)
from forespark.models.blocks import Context, Row, draft_hidden, label_mask
from forespark.models.estimators import PostDraftEstimator, PreDraftEstimator
from forespark.models.losses import (
    Metrics,
    accepted_lengths,
    head_loss,
    post_draft_loss,
    pre_draft_loss,
)


class DSparkDrafter(Drafter):
    """speculators' DSpark: Markov logit bias and confidence head, the paper's baseline.

    Args:
        estimator_rank: of the pre-draft estimator; None: no such estimator, and blocks that
            see themselves both ways.
    """

    def __init__(
        self,
        core: nn.Module,
        options: LossOptions | None = None,
        estimator_rank: int | None = None,
    ) -> None:
        super().__init__(core, options or LossOptions())
        self.directional = estimator_rank is not None
        self.pre: PreDraftEstimator | None = None
        if estimator_rank is not None:
            k = self.num_speculative_tokens
            self.pre = pre_draft_estimator(core, k, estimator_rank, "row")

    @property
    def num_speculative_tokens(self) -> int:
        size = self.core.config.block_size
        return size if self.core.config.sample_from_anchor else size - 1

    @property
    def heads(self) -> tuple[PreDraftEstimator, PostDraftEstimator] | None:
        """The confidence head is a post-draft estimator that reads [h; Markov embedding]."""
        if self.pre is None:
            return None
        linear, rank = self.core.confidence_head.proj, self.core.config.markov_rank
        post = PostDraftEstimator(linear.in_features - rank, rank)
        with torch.no_grad():
            post.w.copy_(linear.weight[0])
            post.bias.copy_(linear.bias)
        return self.pre, post

    def draft(
        self,
        context: Context,
        anchors: torch.Tensor,  # [A]
        length: int,
    ) -> torch.Tensor:
        """Hidden states that predict draft positions 1..length, [A, length, H]."""
        first = 0 if self.core.config.sample_from_anchor else 1
        hidden = draft_hidden(self.core, context, anchors, length + first, self.directional)
        return hidden[:, first:]

    def forward(
        self,
        row: Row,
        anchors: torch.Tensor,  # [A]
        length: int,  # unused: one row of estimates serves all lengths
        rows: LossRows,
    ) -> tuple[torch.Tensor, Metrics]:
        """0.1 CE + 0.9 TV of the biased logits plus the BCE of confidence and estimator."""
        options, core, k = self.options, self.core, self.num_speculative_tokens
        if anchors.numel() == 0:
            return sum(p.sum() for p in self.parameters() if p.requires_grad) * 0.0, {}
        context = Context(core, row)
        mask = label_mask(row, anchors, k)
        hidden = self.draft(context, anchors, k)[mask]
        previous = core.markov_head.prev_embeddings(self._predecessors(row, anchors, mask))
        bias = core.markov_head.markov_w2.weight
        loss, out = head_loss(
            hidden, self._targets(row, anchors, mask), self._head(rows), self._weights(mask),
            ce_weight=options.ce_weight, tv_weight=options.tv_weight, offset=rows.offset,
            extra=previous, extra_weight=bias if rows.rows is None else bias[rows.rows],
        )  # fmt: skip
        correct = spread(out["ids"][:, 0] == out["ids"][:, 1], mask)
        accepted = accepted_lengths(correct, mask)
        confidence = core.confidence_head(torch.cat([hidden, previous], dim=-1))
        # DSpark's own target: 1 - TV over the whole proposal.
        alpha = spread(1.0 - out["tv"], mask)
        post, metrics = post_draft_loss(
            spread(confidence, mask), alpha, mask, options.position_decay, accepted
        )
        total = loss + options.lambda_post * post
        if self.pre is not None:
            z = self.pre(*self.pre_inputs(row, context, anchors))
            pre, pre_metrics = pre_draft_loss(self.pre.row(z, k), alpha, mask, accepted)
            total, metrics = total + options.lambda_pre * pre, metrics | pre_metrics
        metrics |= length_metrics(accepted, mask, correct, out["ce"], out["tv"])
        one = torch.ones(())
        for name, value in (("loss", total), ("unary", loss)):
            metrics |= {f"{name}_sum": value.detach(), f"{name}_total": one}
        return total, metrics
