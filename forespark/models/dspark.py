"""DSpark, the paper's baseline, on the same rows and by the same loop."""

from __future__ import annotations

import torch
from torch import nn

from forespark.models.base import Drafter, LossOptions, LossRows, length_metrics, spread
from forespark.models.blocks import Context, Row, draft_hidden, label_mask
from forespark.models.losses import Metrics, accepted_lengths, head_loss, post_draft_loss


class DSparkDrafter(Drafter):
    """speculators' DSpark: Markov logit bias and confidence head, the paper's baseline."""

    def __init__(self, core: nn.Module, options: LossOptions | None = None) -> None:
        super().__init__(core, options or LossOptions())

    @property
    def num_speculative_tokens(self) -> int:
        size = self.core.config.block_size
        return size if self.core.config.sample_from_anchor else size - 1

    def forward(
        self,
        row: Row,
        anchors: torch.Tensor,  # [A]
        length: int,  # unused: DSpark has no pre-draft estimator
        rows: LossRows,
    ) -> tuple[torch.Tensor, Metrics]:
        """0.1 CE + 0.9 TV of the biased logits plus the confidence BCE."""
        options, core, k = self.options, self.core, self.num_speculative_tokens
        if anchors.numel() == 0:
            return sum(p.sum() for p in self.parameters() if p.requires_grad) * 0.0, {}
        context = Context(core, row)
        mask = label_mask(row, anchors, k)
        first = 0 if core.config.sample_from_anchor else 1
        hidden = draft_hidden(core, context, anchors, k + first)[:, first:][mask]
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
        metrics |= length_metrics(accepted, mask, correct, out["ce"], out["tv"])
        one = torch.ones(())
        for name, value in (("loss", total), ("unary", loss)):
            metrics |= {f"{name}_sum": value.detach(), f"{name}_total": one}
        return total, metrics
