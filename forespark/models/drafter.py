"""Training models: speculators' DFlash 2 with ForeSpark's estimators, and DSpark.

``ForeSparkDrafter`` and ``DSparkDrafter`` hold a speculators core (whose checkpoint stock
vLLM loads) and share one call: a packed row, its anchors and the vocabulary rows of the
loss in, ``(loss, metrics)`` out. Objective: paper, Section 4.5 and Appendix A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forespark.models.blocks import Context, Row, draft_hidden, label_mask
from forespark.models.estimators import PostDraftEstimator, PreDraftEstimator
from forespark.models.losses import (
    EPS,
    Metrics,
    accepted_lengths,
    head_candidates,
    head_loss,
    position_weights,
    post_draft_loss,
    pre_draft_loss,
    selector_loss,
    soft_acceptance,
)
from forespark.models.warm_start import COPIED, warm_start


@dataclass
class LossOptions:
    """Weights of the objective; the defaults are the paper's."""

    ce_weight: float = 0.1
    tv_weight: float = 0.9
    position_decay: float | None = None
    lambda_pre: float = 1.0
    lambda_post: float = 1.0
    redraft_every: int = 4


@dataclass
class LossRows:
    """Vocabulary rows of one step's loss. ``offset`` is None when ``rows`` are all."""

    rows: torch.Tensor | None = None  # [V'] token ids, None: the whole vocabulary
    offset: torch.Tensor | None = None  # [V'] log importance


def draw_rows(
    frequent: torch.Tensor,  # [N] token ids
    needed: torch.Tensor,  # [*] token ids that must be present (this row's tokens)
    samples: int,
    vocabulary: int,
    generator: torch.Generator | None = None,
) -> LossRows:
    """Frequent rows, the step's own tokens, and a random sample standing for the rest.

    The serving head is full, so rare rows must stay below the candidates: each of the
    ``samples`` rows drawn from the R remaining ones is weighted R / samples in both
    softmaxes, which keeps their normalizers unbiased estimates of the full ones.
    """
    kept = torch.zeros(vocabulary, dtype=torch.bool)
    kept[frequent] = True
    kept[needed.unique()] = True
    rest = torch.nonzero(~kept).squeeze(-1)
    always = torch.nonzero(kept).squeeze(-1)
    if samples == 0 or rest.numel() == 0:
        return LossRows(always, torch.zeros(always.numel()))
    samples = min(samples, rest.numel())
    drawn = rest[torch.randint(rest.numel(), (samples,), generator=generator)].unique()
    offset = torch.zeros(always.numel() + drawn.numel())
    offset[always.numel() :] = math.log(rest.numel() / drawn.numel())
    return LossRows(torch.cat([always, drawn]), offset)


def cycle_length(step: int, num_speculative_tokens: int) -> int:
    """Draft length whose pre-draft row step ``step`` trains: K, 1, 2, ..., K-1, K, ..."""
    return step % num_speculative_tokens or num_speculative_tokens


class _Drafter(nn.Module):
    """What both drafters share: labelled positions and their targets."""

    def __init__(self, core: nn.Module, options: LossOptions) -> None:
        super().__init__()
        self.core = core
        self.options = options

    @property
    def num_speculative_tokens(self) -> int:
        raise NotImplementedError

    def _targets(
        self,
        row: Row,
        anchors: torch.Tensor,  # [A]
        mask: torch.Tensor,  # [A, J]
    ) -> torch.Tensor:
        """Target hidden states predicting each labelled position, final norm applied, [P, H]."""
        index = anchors[:, None] + torch.arange(mask.shape[1])  # token before the position
        with torch.no_grad():
            return self.core.verifier_norm(row.last[index[mask]].float())

    def _head(self, rows: LossRows) -> torch.Tensor:
        weight = self.core.lm_head.weight
        return weight if rows.rows is None else weight[rows.rows]

    def _predecessors(
        self,
        row: Row,
        anchors: torch.Tensor,  # [A]
        mask: torch.Tensor,  # [A, J]
    ) -> torch.Tensor:
        """True token before each labelled position, [P]."""
        return row.input_ids[(anchors[:, None] + torch.arange(mask.shape[1]))[mask]]

    def _weights(self, mask: torch.Tensor) -> torch.Tensor:
        """Position weight over the number of labelled positions, [P]."""
        decay = position_weights(mask.shape[1], self.options.position_decay)
        return decay.expand_as(mask)[mask] / (mask.sum() + EPS)


def _spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[P, ...] back to [A, J, ...] with zeros where nothing is labelled."""
    out = values.new_zeros(*mask.shape, *values.shape[1:])
    out[mask] = values
    return out


def _length_metrics(
    accepted: torch.Tensor,  # [A]
    mask: torch.Tensor,  # [A, J]
    correct: torch.Tensor,  # [A, J]
    ce: torch.Tensor,  # [P]
    tv: torch.Tensor,  # [P]
) -> Metrics:
    rows = mask.any(dim=-1).to(torch.float32)
    metrics = {
        "accepted_length_sum": ((accepted + 1) * rows).sum(),
        "accepted_length_total": rows.sum(),
        "ce_sum": ce.sum(),
        "ce_total": mask.sum().float(),
        "tv_sum": tv.sum(),
        "tv_total": mask.sum().float(),
    }
    for j in range(mask.shape[1]):
        metrics[f"acc{j + 1}_sum"] = (correct[:, j] & mask[:, j]).sum().float()
        metrics[f"acc{j + 1}_total"] = mask[:, j].sum().float()
    return metrics


class ForeSparkDrafter(_Drafter):
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
        correct = _spread(match.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), mask)
        accepted = accepted_lengths(correct, mask)
        choice = selector_loss(
            _spread(scores, mask), _spread(match.any(-1), mask),
            _spread(match.int().argmax(-1), mask), mask, options.position_decay,
        )  # fmt: skip
        alpha = _spread(soft_acceptance(out["target_probs"], scores[:, :-1].detach()), mask)
        post, metrics = post_draft_loss(
            _spread(self.post(hidden, feature), mask), alpha, mask, options.position_decay, accepted
        )
        pre, pre_metrics = self._pre_loss(
            row, context, anchors, length, rows, alpha, mask, accepted
        )
        total = loss + choice + options.lambda_pre * pre + options.lambda_post * post
        metrics |= pre_metrics | _length_metrics(accepted, mask, correct, out["ce"], out["tv"])
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
        alpha = _spread(soft_acceptance(out["target_probs"], scores), mask)
        return alpha, accepted_lengths(_spread(chosen == label, mask), mask)


class DSparkDrafter(_Drafter):
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
        correct = _spread(out["ids"][:, 0] == out["ids"][:, 1], mask)
        accepted = accepted_lengths(correct, mask)
        confidence = core.confidence_head(torch.cat([hidden, previous], dim=-1))
        # DSpark's own target: 1 - TV over the whole proposal.
        alpha = _spread(1.0 - out["tv"], mask)
        post, metrics = post_draft_loss(
            _spread(confidence, mask), alpha, mask, options.position_decay, accepted
        )
        total = loss + options.lambda_post * post
        metrics |= _length_metrics(accepted, mask, correct, out["ce"], out["tv"])
        one = torch.ones(())
        for name, value in (("loss", total), ("unary", loss)):
            metrics |= {f"{name}_sum": value.detach(), f"{name}_total": one}
        return total, metrics


def build_drafter(
    name: str,  # forespark | dspark
    *,
    target_model: str,
    target_layer_ids: list[int],
    num_speculative_tokens: int,
    num_layers: int,
    selector_rank: int,
    selector_top_k: int,
    estimator_rank: int,
    mask_token_id: int | None,
    options: LossOptions,
    init: str = "random",
    seed: int = 0,
) -> ForeSparkDrafter | DSparkDrafter:
    """A fresh drafter for a target checkpoint, its embeddings and head frozen copies.

    Raises:
        ValueError: the name is unknown or the target cannot be read.
    """
    from speculators.models.dflash2 import DFlash2DraftModel
    from speculators.models.dspark import DSparkDraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.utils import resolve_mask_token_id

    if name not in ("forespark", "dspark"):
        raise ValueError(f"drafter: got {name!r}, want forespark or dspark")
    try:
        shape = create_transformer_layer_config(
            target_model, num_layers, "qwen3", None, 2048, list(range(num_layers))
        )
    except OSError as error:
        raise ValueError(
            f"{target_model}: cannot read the target's config ({error}); run setup.sh"
        ) from error
    mask_id = resolve_mask_token_id(target_model, shape.vocab_size, mask_token_id)
    arguments: dict[str, Any] = {
        "verifier_name_or_path": target_model,
        "target_layer_ids": list(target_layer_ids),
        "draft_vocab_size": shape.vocab_size,
        "mask_token_id": mask_id,
        # Kept out of the checkpoint by speculators; any value but flex attention loads on a CPU.
        "draft_attn_impl": "sdpa",
    }
    torch.manual_seed(seed)
    if name == "dspark":
        core = DSparkDraftModel.from_training_args(
            shape, block_size=num_speculative_tokens, markov_rank=selector_rank, **arguments
        )
        return DSparkDrafter(_started(core, init, target_model), options)
    core = DFlash2DraftModel.from_training_args(
        shape, block_size=num_speculative_tokens + 1, selector_rank=selector_rank,
        selector_top_k=selector_top_k, **arguments,
    )  # fmt: skip
    return ForeSparkDrafter(_started(core, init, target_model), estimator_rank, options)


def _started(core: nn.Module, init: str, target_model: str) -> nn.Module:
    """The core as speculators made it, or warmed up from the target's last layers."""
    if init == "random":
        return core
    from speculators.models.utils import get_verifier_config
    from speculators.utils.loading import load_model_layers

    layers = get_verifier_config(target_model).num_hidden_layers
    first = layers - len(core.layers)
    names = [f"model.layers.{i}.{n}.weight" for i in range(first, layers) for n in COPIED]
    warm_start(core, load_model_layers(names, target_model), layers)
    return core
