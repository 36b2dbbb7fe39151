"""Training losses: pure functions that take tensors and return ``(loss, metrics)``.

Symbols: A = anchors, J = labelled slots of a block (draft positions 1..J), P = labelled
positions in all, V = vocabulary rows in use, k = selector candidates, H = hidden size.
Averages travel as ``<name>_sum`` and ``<name>_total`` and are divided once, by the reader.

Sources: paper, Section 4.5 (soft acceptance target, estimator losses) and Appendix A
(0.1 cross-entropy + 0.9 total variation, exponentially decaying position weights). The
same objective as speculators 0.9.0 computes from materialized logits; here the vocabulary
projection, both softmaxes and the gradient are done chunk by chunk, because on a CPU
memory traffic over [P, V] costs more than the drafter itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

Metrics = dict[str, torch.Tensor]
EPS = 1e-5  # speculators' guard for an empty mask
CHUNK = 96  # positions per vocabulary projection: keeps [CHUNK, V] in the cache


def position_weights(
    slots: int,
    gamma: float | None,  # None: 4.0, the default of speculators
) -> torch.Tensor:
    """exp(-(j-1)/gamma) for draft positions j = 1..slots, [slots]."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32) / (4.0 if gamma is None else gamma))


def weighted_mean(
    values: torch.Tensor,  # [A, J]
    mask: torch.Tensor,  # [A, J] bool
    weights: torch.Tensor | None = None,  # [J]
) -> torch.Tensor:
    """sum(values * mask * weights) / sum(mask), as speculators reduces its losses.

    The denominator counts positions without their weights, and an empty mask gives 0.
    """
    kept = mask.to(values.dtype)
    weighted = values * kept if weights is None else values * kept * weights
    return weighted.sum() / (kept.sum() + EPS)


def soft_acceptance(
    target_probs: torch.Tensor,  # [*, k]: P_j at the candidates, from the full softmax
    selector_scores: torch.Tensor,  # [*, k]: the selector's scores of its candidates
) -> torch.Tensor:
    """alpha_j = sum over candidates of min(P_j(v), Q_j(v)), Q = softmax(scores). [*]."""
    proposal = torch.softmax(selector_scores.float(), dim=-1)
    return torch.minimum(target_probs.float(), proposal).sum(dim=-1)


def accepted_lengths(
    correct: torch.Tensor,  # [A, J] bool
    mask: torch.Tensor,  # [A, J] bool
) -> torch.Tensor:
    """Accepted drafts per anchor: the leading run of correct labelled slots, [A]."""
    return (correct & mask).to(torch.float32).cumprod(dim=-1).sum(dim=-1)


def estimator_metrics(
    name: str,
    logits: torch.Tensor,  # [A, J]
    alpha: torch.Tensor,  # [A, J] soft acceptance targets
    mask: torch.Tensor,  # [A, J] bool
    accepted: torch.Tensor | None,  # [A] realized accepted drafts; None: not known
) -> Metrics:
    """BCE and Brier per position and the accepted-token error per anchor.

    The error is |sum of predicted survival - accepted|, with the realized count where it
    is known and the expected one (from alpha) otherwise.
    """
    with torch.no_grad():
        kept = mask.to(torch.float32)
        prob = torch.sigmoid(logits.float())
        bce = functional.binary_cross_entropy_with_logits(
            logits.float(), alpha.float(), reduction="none"
        )
        survival = (prob * kept).cumprod(dim=-1).sum(dim=-1)
        expected = (alpha.float() * kept).cumprod(dim=-1).sum(dim=-1)
        known = expected if accepted is None else accepted
        rows = mask.any(dim=-1).to(torch.float32)
        return {
            f"{name}_bce_sum": (bce * kept).sum(),
            f"{name}_bce_total": kept.sum(),
            f"{name}_brier_sum": ((prob - alpha.float()).square() * kept).sum(),
            f"{name}_brier_total": kept.sum(),
            f"{name}_token_error_sum": ((survival - known).abs() * rows).sum(),
            f"{name}_token_error_total": rows.sum(),
        }


def post_draft_loss(
    logits: torch.Tensor,  # [A, J]
    alpha: torch.Tensor,  # [A, J]
    mask: torch.Tensor,  # [A, J] bool; the anchor slot is not part of J
    gamma: float | None,
    accepted: torch.Tensor | None = None,  # [A]
) -> tuple[torch.Tensor, Metrics]:
    """BCE against alpha with the drafter's position weights (Section 4.5)."""
    weights = position_weights(logits.shape[-1], gamma).to(logits.device)
    bce = functional.binary_cross_entropy_with_logits(
        logits.float(), alpha.detach().float(), reduction="none"
    )
    loss = weighted_mean(bce, mask, weights)
    return loss, estimator_metrics("post", logits, alpha, mask, accepted)


def pre_draft_loss(
    logits: torch.Tensor,  # [A, d]: row d of the triangle
    alpha: torch.Tensor,  # [A, d]: targets of a draft of exactly d tokens
    mask: torch.Tensor,  # [A, d] bool
    accepted: torch.Tensor | None = None,  # [A]
) -> tuple[torch.Tensor, Metrics]:
    """BCE of one triangle row against alpha_{d,j} (Section 4.5)."""
    bce = functional.binary_cross_entropy_with_logits(
        logits.float(), alpha.detach().float(), reduction="none"
    )
    return weighted_mean(bce, mask), estimator_metrics("pre", logits, alpha, mask, accepted)


def selector_loss(
    scores: torch.Tensor,  # [A, J, k+1]: the k candidates, then the target token
    has_target: torch.Tensor,  # [A, J] bool: the target is one of the k
    target_rank: torch.Tensor,  # [A, J]: its place among the k, where it is
    mask: torch.Tensor,  # [A, J] bool
    gamma: float | None,
) -> torch.Tensor:
    """Cross-entropy over k candidates; a missing target takes the weakest one's place."""
    last = torch.where(has_target, scores[..., -2], scores[..., -1])
    training = torch.cat([scores[..., :-2], last.unsqueeze(-1)], dim=-1)
    rank = torch.where(has_target, target_rank, training.shape[-1] - 1)
    ce = functional.cross_entropy(
        training.flatten(0, -2).float(), rank.flatten(), reduction="none"
    ).view(rank.shape)
    return weighted_mean(ce, mask, position_weights(scores.shape[1], gamma).to(scores.device))


class _HeadLoss(torch.autograd.Function):
    """Weighted CE + TV through the vocabulary projection, gradients formed chunkwise."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,  # [P, H]
        extra: torch.Tensor | None,  # [P, e] second factor of the logits, or None
        extra_weight: torch.Tensor | None,  # [V, e]
        target_hidden: torch.Tensor,  # [P, H] final hidden states, normed
        head: torch.Tensor,  # [V, H], frozen
        offset: torch.Tensor | None,  # [V] log importance of sampled rows
        weights: torch.Tensor,  # [P] mask * decay / denominator
        ce_weight: float,
        tv_weight: float,
        top_k: int,
    ) -> tuple[torch.Tensor, ...]:
        positions, vocabulary = hidden.shape[0], head.shape[0]
        d_hidden = torch.empty_like(hidden)
        d_extra = None if extra is None else torch.empty_like(extra)
        d_weight = None if extra_weight is None else torch.zeros_like(extra_weight)
        ce, tv = hidden.new_empty(positions), hidden.new_empty(positions)
        label = torch.empty(positions, dtype=torch.long, device=hidden.device)
        top_ids = torch.empty(positions, top_k, dtype=torch.long, device=hidden.device)
        top_logits = hidden.new_empty(positions, top_k)
        top_probs = hidden.new_empty(positions, top_k)
        label_logit = hidden.new_empty(positions)
        # The same buffers serve every chunk: on a CPU, fresh pages cost more than the arithmetic.
        size = min(CHUNK, positions)
        buffers = [hidden.new_empty(size, vocabulary) for _ in range(3)]
        for start in range(0, positions, CHUNK):
            part = slice(start, min(start + CHUNK, positions))
            logits, targets, below = (b[: part.stop - start] for b in buffers)
            torch.mm(hidden[part], head.T, out=logits)
            if extra is not None and extra_weight is not None:
                logits.addmm_(extra[part], extra_weight.T)
            torch.mm(target_hidden[part], head.T, out=targets)
            label[part] = targets.argmax(dim=-1)
            column = label[part].unsqueeze(-1)
            top_logits[part], top_ids[part] = logits.topk(top_k, dim=-1)
            label_logit[part] = logits.gather(-1, column).squeeze(-1)
            if offset is not None:
                logits += offset
                targets += offset
            proposal = torch.softmax(logits, dim=-1, out=logits)
            wanted = torch.softmax(targets, dim=-1, out=targets)
            top_probs[part] = wanted.gather(-1, top_ids[part])
            ce[part] = -proposal.gather(-1, column).squeeze(-1).clamp_min(1e-30).log()
            torch.lt(proposal, wanted, out=below)  # 1 where min picks the proposal
            torch.minimum(proposal, wanted, out=wanted)
            tv[part] = 1.0 - wanted.sum(dim=-1)
            share = torch.linalg.vecdot(below, proposal).unsqueeze(-1)
            # d(ce)/dz = q - 1[label]; d(tv)/dz = q (share - below)
            scale = weights[part].unsqueeze(-1)
            gradient = below.mul_(-tv_weight).add_(ce_weight + tv_weight * share)
            gradient.mul_(proposal)
            gradient.scatter_add_(-1, column, torch.full_like(scale, -ce_weight))
            torch.mm(gradient, head, out=d_hidden[part]).mul_(scale)
            if extra is not None and extra_weight is not None:
                assert d_extra is not None and d_weight is not None
                torch.mm(gradient, extra_weight, out=d_extra[part]).mul_(scale)
                d_weight.addmm_(gradient.T, extra[part] * scale)
        loss = (weights * (ce_weight * ce + tv_weight * tv)).sum()
        ids = torch.cat([top_ids, label.unsqueeze(-1)], dim=-1)
        scores = torch.cat([top_logits, label_logit.unsqueeze(-1)], dim=-1)
        saved = [t for t in (d_extra, d_weight, extra, extra_weight) if t is not None]
        ctx.save_for_backward(d_hidden, head, ids, *saved)
        ctx.mark_non_differentiable(ce, tv, ids, top_probs)
        return loss, scores, ce, tv, ids, top_probs

    @staticmethod
    def backward(ctx: Any, g_loss: torch.Tensor, g_scores: torch.Tensor, *_: Any) -> Any:
        d_hidden, head, ids, *rest = ctx.saved_tensors
        g_scores = g_scores.to(head.dtype).contiguous()
        out = functional.embedding_bag(ids, head, per_sample_weights=g_scores, mode="sum")
        out = out + g_loss * d_hidden
        g_extra = g_weight = None
        if rest:
            # DSpark has no selector, so nothing flows back through ``scores``.
            d_extra, d_weight, _extra, _weight = rest
            g_extra, g_weight = g_loss * d_extra, g_loss * d_weight
        return out, g_extra, g_weight, None, None, None, None, None, None, None


def head_loss(
    hidden: torch.Tensor,  # [P, H] drafter hidden states at labelled positions
    target_hidden: torch.Tensor,  # [P, H] target hidden states after its final norm
    head: torch.Tensor,  # [V, H] vocabulary rows, frozen
    weights: torch.Tensor,  # [P] mask * decay / number of labelled positions
    *,
    ce_weight: float = 0.1,
    tv_weight: float = 0.9,
    top_k: int = 1,
    offset: torch.Tensor | None = None,  # [V] added to both logits: log importance
    extra: torch.Tensor | None = None,  # [P, e]
    extra_weight: torch.Tensor | None = None,  # [V, e]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """0.1 CE + 0.9 TV against the target's distribution, and what the selector needs.

    Logits are ``hidden @ head.T (+ extra @ extra_weight.T)``; CE takes the target's argmax
    as its label. ``offset`` corrects rows that stand for others (see ``draw_rows``).

    Returns:
        The weighted loss and a dict: ``ids`` [P, k+1] rows of the k best logits and, last,
        of the label; ``scores`` [P, k+1] their uncorrected logits (differentiable in
        ``hidden``); ``target_probs`` [P, k] P at the k best; ``ce``, ``tv`` [P].
    """
    loss, scores, ce, tv, ids, probs = _HeadLoss.apply(
        hidden, extra, extra_weight, target_hidden, head, offset, weights,
        ce_weight, tv_weight, top_k,
    )  # fmt: skip
    return loss, {"scores": scores, "ce": ce, "tv": tv, "ids": ids, "target_probs": probs}


@torch.no_grad()
def head_candidates(
    hidden: torch.Tensor,  # [P, H]
    target_hidden: torch.Tensor,  # [P, H]
    head: torch.Tensor,  # [V, H]
    top_k: int,
    offset: torch.Tensor | None = None,  # [V]
) -> dict[str, torch.Tensor]:
    """Candidates without a loss: ``ids``, ``scores``, ``target_probs`` [P, k], ``label`` [P]."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, hidden.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        scores, ids = (hidden[part] @ head.T).topk(top_k, dim=-1)
        targets = target_hidden[part] @ head.T
        label = targets.argmax(dim=-1)
        if offset is not None:
            targets += offset
        probs = torch.softmax(targets, dim=-1).gather(-1, ids)
        parts.append((ids, scores, probs, label))
    if not parts:
        empty = hidden.new_zeros(0, top_k)
        parts = [(empty.long(), empty, empty, empty[:, 0].long())]
    ids, scores, probs, label = (torch.cat(column) for column in zip(*parts, strict=True))
    return {"ids": ids, "scores": scores, "target_probs": probs, "label": label}
