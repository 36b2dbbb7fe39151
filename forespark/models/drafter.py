"""The ForeSpark training model: speculators' DFlash 2 with both estimators.

The core is speculators' own, so stock vLLM loads its checkpoint; a packed row, its anchors
and the vocabulary rows of the loss go in, ``(loss, metrics)`` come out. Objective: paper,
Section 4.5 and Appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    head_candidates,
    head_loss,
    post_draft_loss,
    pre_draft_loss,
    selector_loss,
    soft_acceptance,
)


@dataclass
class Drafted:
    """Length-K drafts of one row's anchors and the drafter's own losses, [P] labelled."""

    mask: torch.Tensor  # [A, K] labelled positions
    hidden: torch.Tensor  # [P, H]
    feature: torch.Tensor  # [P, selector_rank]: s
    scores: torch.Tensor  # [P, k+1] selector scores of the candidates and of the label
    target_probs: torch.Tensor  # [P, k]
    accepted: torch.Tensor  # [A] greedy counts
    unary: torch.Tensor  # weighted CE + TV
    choice: torch.Tensor  # the selector's cross-entropy
    metrics: Metrics


@dataclass
class Judged:
    """Drafts of one length and what of them would be accepted, without gradients."""

    mask: torch.Tensor  # [A, d]
    hidden: torch.Tensor  # [P, H]
    feature: torch.Tensor  # [P, selector_rank]
    alpha: torch.Tensor  # [A, d]
    accepted: torch.Tensor  # [A]


def no_loss(model: nn.Module) -> tuple[torch.Tensor, Metrics]:
    """Of a row without anchors: a zero that still has gradients."""
    return sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0, {}


class ForeSparkDrafter(Drafter):
    """DFlash 2 core plus pre- and post-draft estimators.

    Args:
        directional: causal blocks; the pre-draft estimator then has row K only, since a
            shorter draft is the beginning of a longer one (Section 4.2).
    """

    def __init__(
        self,
        core: nn.Module,
        estimator_rank: int,
        options: LossOptions | None = None,
        directional: bool = False,
    ) -> None:
        super().__init__(core, options or LossOptions())
        self.directional = directional
        form = "row" if directional else "triangle"
        hidden = core.config.transformer_layer_config.hidden_size
        self.pre = pre_draft_estimator(core, self.num_speculative_tokens, estimator_rank, form)
        self.post = PostDraftEstimator(hidden, core.config.selector_rank)

    @property
    def num_speculative_tokens(self) -> int:
        return self.core.config.block_size - 1

    @property
    def heads(self) -> tuple[PreDraftEstimator, PostDraftEstimator]:
        return self.pre, self.post

    def draft(
        self,
        context: Context,
        anchors: torch.Tensor,  # [A]
        length: int,
    ) -> torch.Tensor:
        """h of draft positions 1..length in a draft of exactly that length, [A, length, H]."""
        return draft_hidden(self.core, context, anchors, length + 1, self.directional)[:, 1:]

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
        options = self.options
        if anchors.numel() == 0:
            return no_loss(self)
        context = Context(self.core, row)
        d = self._drafted(row, context, anchors, rows)
        alpha = spread(soft_acceptance(d.target_probs, d.scores[:, :-1].detach()), d.mask)
        post, metrics = post_draft_loss(
            spread(self.post(d.hidden, d.feature), d.mask), alpha, d.mask,
            options.position_decay, d.accepted,
        )  # fmt: skip
        pre, pre_metrics = self._pre_loss(
            row, context, anchors, length, rows, alpha, d.mask, d.accepted
        )
        total = d.unary + d.choice + options.lambda_pre * pre + options.lambda_post * post
        metrics |= pre_metrics | d.metrics
        metrics |= {"loss_sum": total.detach(), "loss_total": torch.ones(())}
        return total, metrics

    def backbone_loss(
        self,
        row: Row,
        anchors: torch.Tensor,  # [A]
        rows: LossRows,
    ) -> tuple[torch.Tensor, Metrics]:
        """Loss of plain DFlash 2: what ``forward`` computes without the estimators."""
        if anchors.numel() == 0:
            return no_loss(self.core)
        d = self._drafted(row, Context(self.core, row), anchors, rows)
        total = d.unary + d.choice
        return total, {**d.metrics, "loss_sum": total.detach(), "loss_total": torch.ones(())}

    def _drafted(
        self,
        row: Row,
        context: Context,
        anchors: torch.Tensor,  # [A]
        rows: LossRows,
    ) -> Drafted:
        options = self.options
        mask = label_mask(row, anchors, self.num_speculative_tokens)
        hidden = self.draft(context, anchors, self.num_speculative_tokens)[mask]
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
        metrics = length_metrics(accepted, mask, correct, out["ce"], out["tv"])
        one = torch.ones(())
        for name, value in (("unary", loss), ("selector", choice)):
            metrics |= {f"{name}_sum": value.detach(), f"{name}_total": one}
        return Drafted(
            mask, hidden, feature, scores, out["target_probs"], accepted, loss, choice, metrics
        )

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
        """BCE of row ``length``; below K, from every fourth anchor drafted anew.

        The one row of a directional drafter is labelled by every length-K draft.
        """
        if self.directional:
            length = self.num_speculative_tokens
        if length < self.num_speculative_tokens:
            anchors = anchors[:: self.options.redraft_every]
            mask = mask[:: self.options.redraft_every, :length]
            alpha, accepted = self.acceptance(row, context, anchors, length, rows)
        z = self.pre(*self.pre_inputs(row, context, anchors))
        return pre_draft_loss(self.pre.row(z, length), alpha, mask, accepted)

    def acceptance(
        self,
        row: Row,
        context: Context,
        anchors: torch.Tensor,  # [A]
        length: int,
        rows: LossRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """alpha_{d,j} [A, d] of drafts of exactly ``length`` tokens and greedy counts [A]."""
        judged = self.judge(row, context, anchors, length, rows)
        return judged.alpha, judged.accepted

    @torch.no_grad()
    def judge(
        self,
        row: Row,
        context: Context,
        anchors: torch.Tensor,  # [A]
        length: int,
        rows: LossRows,
    ) -> Judged:
        """Draft exactly ``length`` tokens from each anchor and see what would be accepted."""
        mask = label_mask(row, anchors, length)
        hidden = self.draft(context, anchors, length)[mask]
        out = head_candidates(
            hidden, self._targets(row, anchors, mask), self._head(rows),
            self.core.candidate_selector.top_k, rows.offset,
        )  # fmt: skip
        ids = out["ids"] if rows.rows is None else rows.rows[out["ids"]]
        label = out["label"] if rows.rows is None else rows.rows[out["label"]]
        scores, feature = self.selector_scores(
            hidden, self._predecessors(row, anchors, mask), ids, out["scores"]
        )
        chosen = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        alpha = spread(soft_acceptance(out["target_probs"], scores), mask)
        counts = accepted_lengths(spread(chosen == label, mask), mask)
        return Judged(mask, hidden, feature, alpha, counts)


class FrozenDrafter(ForeSparkDrafter):
    """Both estimators on a drafter that stays as it is: the same two losses, no others."""

    def __init__(
        self,
        core: nn.Module,
        estimator_rank: int,
        options: LossOptions | None = None,
        directional: bool = False,
    ) -> None:
        super().__init__(core, estimator_rank, options, directional)
        self.core.requires_grad_(False)

    def forward(
        self,
        row: Row,
        anchors: torch.Tensor,  # [A]
        length: int,  # d: the pre-draft row trained now
        rows: LossRows,
    ) -> tuple[torch.Tensor, Metrics]:
        """lambda_pre L_pre + lambda_post L_post of one packed row (Section 4.5)."""
        if anchors.numel() == 0:
            return no_loss(self)
        options = self.options
        with torch.no_grad():
            context = Context(self.core, row)
        d = self.judge(row, context, anchors, self.num_speculative_tokens, rows)
        post, metrics = post_draft_loss(
            spread(self.post(d.hidden, d.feature), d.mask), d.alpha, d.mask,
            options.position_decay, d.accepted,
        )  # fmt: skip
        pre, pre_metrics = self._pre_loss(
            row, context, anchors, length, rows, d.alpha, d.mask, d.accepted
        )
        total = options.lambda_pre * pre + options.lambda_post * post
        drafts = d.mask.any(dim=-1).to(torch.float32)
        metrics |= pre_metrics | {
            "accepted_length_sum": ((d.accepted + 1) * drafts).sum(),
            "accepted_length_total": drafts.sum(),
            "loss_sum": total.detach(),
            "loss_total": torch.ones(()),
        }
        return total, metrics
