"""The ForeSpark training model: speculators' DFlash 2 with both estimators.

The core is speculators' own, so stock vLLM loads its checkpoint; a packed row, its anchors
and the vocabulary rows of the loss go in, ``(loss, metrics)`` come out. Objective: paper,
Section 4.5 and Appendix A.
"""

from __future__ import annotations

import torch
from torch import nn

from forespark.models.base import Drafter, LossOptions, LossRows, length_metrics, spread
from forespark.models.blocks import Context, Row, draft_hidden, label_mask
from forespark.models.estimators import PostDraftEstimator, PreDraftEstimator
from forespark.models.losses import (
    Metrics,
    accepted_lengths,
    head_candidates,
    head_loss,
    post_draft_loss,
    pre_draft_loss,
    selector_loss,
    soft_acceptance,
)


class ForeSparkDrafter(Drafter):
    """DFlash 2 core plus pre- and post-draft estimators."""

    def __init__(
        self,
        core: nn.Module,
        estimator_rank: int,
        options: LossOptions | None = None,
        form: str = "triangle",
    ) -> None:
        super().__init__(core, options or LossOptions())
        hidden = core.config.transformer_layer_config.hidden_size
        embedding = core.embed_tokens.weight
        rms = embedding.detach().float().square().mean().sqrt()
        scale = 1.0 / float(rms) if torch.isfinite(rms) and rms > 0 else 1.0
        self.pre = PreDraftEstimator(
            self.num_speculative_tokens, hidden, embedding.shape[1], estimator_rank, form, scale
        )
        self.post = PostDraftEstimator(hidden, core.config.selector_rank)

    @property
    def num_speculative_tokens(self) -> int:
        return self.core.config.block_size - 1

    def draft(
        self,
        context: Context,
        anchors: torch.Tensor,  # [A]
        length: int,
    ) -> torch.Tensor:
        """h of draft positions 1..length in a draft of exactly that length, [A, length, H]."""
        return draft_hidden(self.core, context, anchors, length + 1)[:, 1:]

    def selector_scores(
        self,
        hidden: torch.Tensor,  # [P, H]
        predecessors: torch.Tensor,  # [P]
        candidates: torch.Tensor,  # [P, n] token ids
        unary: torch.Tensor,  # [P, n]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selector scores [P, n] and the feature s [P, selector_rank]."""
        selector = self.core.candidate_selector
        feature = selector.context(hidden, predecessors)
        successors = nn.functional.embedding(candidates, selector.successor_codebook)
        return unary + (successors @ feature.unsqueeze(-1)).squeeze(-1), feature

    def forward(
        self,
        row: Row,
        anchors: torch.Tensor,  # [A]
        length: int,  # d: the pre-draft row trained now
        rows: LossRows,
    ) -> tuple[torch.Tensor, Metrics]:
        """Loss of one packed row; without anchors, a zero that still has gradients."""
        options, k = self.options, self.num_speculative_tokens
        if anchors.numel() == 0:
            return sum(p.sum() for p in self.parameters() if p.requires_grad) * 0.0, {}
        context = Context(self.core, row)
        mask = label_mask(row, anchors, k)
        hidden = self.draft(context, anchors, k)[mask]
        loss, out = head_loss(
            hidden, self._targets(row, anchors, mask), self._head(rows), self._weights(mask),
            ce_weight=options.ce_weight, tv_weight=options.tv_weight,
            top_k=self.core.candidate_selector.top_k, offset=rows.offset,
        )  # fmt: skip
        ids = out["ids"] if rows.rows is None else rows.rows[out["ids"]]
        scores, feature = self.selector_scores(
            hidden, self._predecessors(row, anchors, mask), ids, out["scores"]
        )
        match = ids[:, :-1] == ids[:, -1:]
        chosen = scores[:, :-1].argmax(dim=-1)
        correct = spread(match.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), mask)
        accepted = accepted_lengths(correct, mask)
        choice = selector_loss(
            spread(scores, mask), spread(match.any(-1), mask),
            spread(match.int().argmax(-1), mask), mask, options.position_decay,
        )  # fmt: skip
        alpha = spread(soft_acceptance(out["target_probs"], scores[:, :-1].detach()), mask)
        post, metrics = post_draft_loss(
            spread(self.post(hidden, feature), mask), alpha, mask, options.position_decay, accepted
        )
        pre, pre_metrics = self._pre_loss(
            row, context, anchors, length, rows, alpha, mask, accepted
        )
        total = loss + choice + options.lambda_pre * pre + options.lambda_post * post
        metrics |= pre_metrics | length_metrics(accepted, mask, correct, out["ce"], out["tv"])
        one = torch.ones(())
        for name, value in (("loss", total), ("unary", loss), ("selector", choice)):
            metrics |= {f"{name}_sum": value.detach(), f"{name}_total": one}
        return total, metrics

    def _pre_loss(
        self,
        row: Row,
        context: Context,
        anchors: torch.Tensor,  # [A]
        length: int,
        rows: LossRows,
        alpha: torch.Tensor,  # [A, K] targets of the length-K draft
        mask: torch.Tensor,  # [A, K]
        accepted: torch.Tensor,  # [A]
    ) -> tuple[torch.Tensor, Metrics]:
        """BCE of row ``length``; below K, from every fourth anchor drafted anew."""
        if length < self.num_speculative_tokens:
            anchors = anchors[:: self.options.redraft_every]
            mask = mask[:: self.options.redraft_every, :length]
            alpha, accepted = self.acceptance(row, context, anchors, length, rows)
        z = self.pre(*self.pre_inputs(row, context, anchors))
        return pre_draft_loss(self.pre.row(z, length), alpha, mask, accepted)

    def pre_inputs(
        self,
        row: Row,
        context: Context,
        anchors: torch.Tensor,  # [A]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """c (context row at anchor - 1) and e (anchor embedding), both cut off, [A, H]."""
        embedding = self.core.embed_tokens(row.input_ids[anchors])
        return context.features[anchors - 1].detach(), embedding.detach()

    @torch.no_grad()
    def acceptance(
        self,
        row: Row,
        context: Context,
        anchors: torch.Tensor,  # [A]
        length: int,
        rows: LossRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """alpha_{d,j} [A, d] of drafts of exactly ``length`` tokens and greedy counts [A]."""
        mask = label_mask(row, anchors, length)
        hidden = self.draft(context, anchors, length)[mask]
        out = head_candidates(
            hidden, self._targets(row, anchors, mask), self._head(rows),
            self.core.candidate_selector.top_k, rows.offset,
        )  # fmt: skip
        ids = out["ids"] if rows.rows is None else rows.rows[out["ids"]]
        label = out["label"] if rows.rows is None else rows.rows[out["label"]]
        scores, _ = self.selector_scores(
            hidden, self._predecessors(row, anchors, mask), ids, out["scores"]
        )
        chosen = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        alpha = spread(soft_acceptance(out["target_probs"], scores), mask)
        return alpha, accepted_lengths(spread(chosen == label, mask), mask)
