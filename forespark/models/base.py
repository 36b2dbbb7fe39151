"""What both drafters share: options, vocabulary rows of a loss, labelled positions, targets.

Symbols: A = anchors, J = labelled slots of a block, P = labelled positions in all, H = hidden
size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from forespark.models.blocks import Context, Row
from forespark.models.estimators import PostDraftEstimator, PreDraftEstimator
from forespark.models.losses import EPS, Metrics, position_weights


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
    drawn = torch.randint(rest.numel(), (samples,), generator=generator, device="cpu")
    drawn = rest[drawn.to(rest.device)].unique()
    offset = torch.zeros(always.numel() + drawn.numel())
    offset[always.numel() :] = math.log(rest.numel() / drawn.numel())
    return LossRows(torch.cat([always, drawn]), offset)


def cycle_length(step: int, num_speculative_tokens: int) -> int:
    """Draft length whose pre-draft row step ``step`` trains: K, 1, 2, ..., K-1, K, ..."""
    return step % num_speculative_tokens or num_speculative_tokens


@torch.no_grad()
def state_scale(
    states: torch.Tensor,  # [T, layers * H] captured states, documents' first tokens left out
) -> torch.Tensor:
    """1 / RMS of every captured dimension, [layers * H].

    A residual stream grows fifteenfold from the first captured layer to the last and keeps
    half its energy in a handful of dimensions that hardly vary. A fusion trained on it raw
    sees those only; trained on scaled inputs it sees all alike. The scale is folded into
    ``fc`` on export, so serving reads the raw states.
    """
    return 1.0 / states.float().square().mean(dim=0).sqrt().clamp_min(1e-6)


class Drafter(nn.Module):
    """What both drafters share: labelled positions and their targets."""

    def __init__(self, core: nn.Module, options: LossOptions) -> None:
        super().__init__()
        self.core = core
        self.options = options
        ones = torch.ones(core.fc.in_features)
        core.fc.register_buffer("input_scale", ones, persistent=False)

    @property
    def num_speculative_tokens(self) -> int:
        raise NotImplementedError

    @property
    def heads(self) -> tuple[PreDraftEstimator, PostDraftEstimator] | None:
        """Both estimators as serving reads them; None of a drafter without a pre-draft one."""
        raise NotImplementedError

    def pre_inputs(
        self,
        row: Row,
        context: Context,
        anchors: torch.Tensor,  # [A]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """c (context row at anchor - 1) and e (anchor embedding), both cut off, [A, H]."""
        embedding = self.core.embed_tokens(row.input_ids[anchors])
        return context.features[anchors - 1].detach(), embedding.detach()

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


def pre_draft_estimator(
    core: nn.Module, num_speculative_tokens: int, rank: int, form: str
) -> PreDraftEstimator:
    """A fresh one for a drafter; the anchors' embeddings enter it with about unit variance."""
    embedding = core.embed_tokens.weight
    rms = embedding.detach().float().square().mean().sqrt()
    scale = 1.0 / float(rms) if torch.isfinite(rms) and rms > 0 else 1.0
    hidden = core.config.transformer_layer_config.hidden_size
    return PreDraftEstimator(
        num_speculative_tokens, hidden, embedding.shape[1], rank, form, scale
    )


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[P, ...] back to [A, J, ...] with zeros where nothing is labelled."""
    out = values.new_zeros(*mask.shape, *values.shape[1:])
    out[mask] = values
    return out


def length_metrics(
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
