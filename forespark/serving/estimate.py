"""Both acceptance estimators as the engine runs them: weights, calibration, walk.

The estimators are those of ``forespark.models``; here they meet vLLM's tensors: the
context feature after the drafter's ``fc`` and ``hidden_norm``, the target's embedding,
the drafter's final hidden states and its selector's projection and codebook.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forespark import record
from forespark.fore_d.calibrated import Calibration
from forespark.fore_d.costs import CostTables
from forespark.fore_d.envelope import scores_from_logits
from forespark.fore_d.online import Memory, OnlineCalibration
from forespark.fore_d.survival import entries, last_row
from forespark.models.estimators import PostDraftEstimator, PreDraftEstimator, load_heads
from forespark.serving.kernels.walk import walk_kernel
from forespark.serving.packed import Anchors, Blocks
from forespark.serving.proposal import Proposal, Scored
from forespark.serving.ranks import Ranks
from forespark.serving.selector import WalkInputs, WalkOutputs, draft_noise, walk, walk_numba


@dataclass
class Estimators:
    """Attributes:
    pre, post: the heads, in float32 on the engine's device.
    form: ``triangle`` or ``row``, of the curve that is read (the arm may read one row).
    scale, bias: [T] pre-draft calibration in that form; 1 and 0 without one.
    theta: [K] post-draft temperatures; 1 without a calibration.
    costs: latency tables; None when the arm plans nothing.
    """

    pre: PreDraftEstimator
    post: PostDraftEstimator
    K: int
    form: str
    scale: torch.Tensor
    bias: torch.Tensor
    theta: torch.Tensor
    costs: CostTables | None
    _norm: tuple[torch.Tensor, float] | None = field(default=None)
    _selector: Any = field(default=None)

    @classmethod
    def load(
        cls,
        heads: Path,
        settings: dict[str, Any],
        K: int,
        device: torch.device,
        engine: dict[str, Any],
        ranks: Ranks,
    ) -> Estimators:
        """Read heads, calibration and tables; refuse what was made for something else.

        Args:
            engine: LATENCY_KEY fields as the running engine has them; flags given to
                ``vllm serve`` may differ from the configuration.
            ranks: every rank prices steps by rank 0's latency tables.

        Raises:
            ValueError: a file is missing, corrupt or has another key.
        """
        drafter = heads.parent / "model.safetensors"
        pre, post, meta = load_heads(
            heads, drafter=drafter, num_speculative_tokens=K, target=settings["target"]
        )
        form = "row" if settings["curve"] == "single" else meta.form
        scale, bias = torch.ones(entries(K, form)), torch.zeros(entries(K, form))
        theta = torch.ones(K)
        if settings["calibration"] is not None:
            scale, bias, theta = _calibration(Path(settings["calibration"]), settings, K, form)
        costs = None
        if settings["latency"] is not None:
            wanted = {**settings["latency_key"], **engine}
            costs = _costs(Path(settings["latency"]), wanted, ranks)
        return cls(
            pre.to(device).eval(),
            post.to(device).eval(),
            K,
            form,
            scale.to(device),
            bias.to(device),
            theta.to(device),
            costs,
        )

    def attach(self, drafter: nn.Module, dtype: torch.dtype) -> None:
        """Take the tensors of the loaded drafter that both estimators read."""
        inner: Any = drafter.model
        self._norm = (inner._hidden_norm_weight.float(), float(inner._rms_norm_eps))
        self._selector = getattr(inner, "candidate_selector", None)  # DFlash 2's

    def before_draft(
        self,
        context: torch.Tensor,  # [R, d_h] after fc, before hidden_norm
        embedding: torch.Tensor,  # [R, d_e]
    ) -> Scored:
        """Pre-draft logits and scores (Eq. (2), (3), Section 4.3)."""
        assert self._norm is not None
        weight, eps = self._norm
        context = context.float()
        feature = context * torch.rsqrt(context.pow(2).mean(-1, keepdim=True) + eps) * weight
        logits = self.pre(feature, embedding.float())
        scores, bad = scores_from_logits(
            self.read(logits), self.scale, self.bias, self.K, self.form
        )
        return Scored(logits, scores, bad)

    def read(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, T] the part of the pre-draft logits that is read (``form``)."""
        return last_row(logits, self.K) if self.form != self.pre.form else logits

    def follow(self, samples: float, slots: int) -> OnlineCalibration | None:
        """What refits this calibration while serving; None where ``samples`` is 0."""
        if samples == 0:
            return None
        memory = Memory(samples=samples)
        return OnlineCalibration(
            slots, self.K, self.form, self.scale, self.bias, self.theta, memory
        )

    def walk(
        self,
        hidden: torch.Tensor,  # [M, d_h] drafter hidden states of the draft positions
        candidate_ids: torch.Tensor,  # [M, C]
        unary: torch.Tensor,  # [M, C]
        anchors: Anchors,
        blocks: Blocks,
        proposal: Proposal,
        temperature: torch.Tensor,  # [R]
        seeds: torch.Tensor | None,  # [R]; None drafts greedily whatever the temperature
    ) -> tuple[WalkOutputs, torch.Tensor]:
        """Selector walk; returns its outputs and the post-draft logits [M] (Eq. (5))."""
        size = hidden.shape[1]
        weight = self.post.w
        selector = self._selector
        inputs = WalkInputs(
            candidate_ids=candidate_ids,
            unary=unary.float(),
            hidden=selector.hidden_projection(hidden).float(),
            first=torch.cumsum(proposal.lengths, 0) - proposal.lengths,
            lengths=proposal.lengths,
            anchor=anchors.token,
            predecessor=selector.predecessor_codebook,
            successor=selector.successor_codebook,
            weight=weight[size:],
            temperature=temperature.float(),
        )
        if candidate_ids.is_cuda:
            linear = hidden.float() @ weight[:size]
            return walk_kernel(inputs, linear, self.post.bias, seeds, anchors.position)
        if seeds is not None:
            inputs.noise = _noise(candidate_ids, anchors, blocks, seeds)
        codebook = selector.predecessor_codebook
        if codebook.device.type == "cpu" and codebook.dtype == torch.float32:
            out = walk_numba(inputs)
        else:
            out = walk(inputs, int(proposal.on_host().max()))
        logits = hidden.float() @ weight[:size] + out.confidence + self.post.bias
        return out, logits


def _costs(path: Path, wanted: dict[str, Any], ranks: Ranks) -> CostTables:
    """Rank 0's latency tables. Only its file is read, and only its key is checked."""

    def checked() -> dict[str, Any]:
        content = record.read_json(path)
        CostTables.from_record(content, wanted, str(path))
        return content

    return CostTables.from_record(ranks.from_first(checked), None, str(path))


def _calibration(
    path: Path, settings: dict[str, Any], K: int, form: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale and bias [T] in ``form`` and theta [K] from a ``calibration.json``."""
    wanted = {
        "target": settings["target"],
        "drafter_sha256": settings["drafter_sha256"],
        "K": K,
    }
    fitted = Calibration.from_record(record.read_json(path), wanted, str(path))
    if fitted.pre is None or (form == "triangle" and fitted.pre.form == "row"):
        raise ValueError(f"{path}: calibrated for one curve, but the arm reads one per length")
    scale, bias = (torch.from_numpy(part) for part in fitted.pre.flat())
    if form != fitted.pre.form:
        scale, bias = last_row(scale, K), last_row(bias, K)
    return scale, bias, torch.tensor(fitted.post.theta)


def _noise(
    candidate_ids: torch.Tensor, anchors: Anchors, blocks: Blocks, seeds: torch.Tensor
) -> torch.Tensor:
    """[M, C] Gumbel noise keyed by request seed, position and candidate token."""
    # A draw is keyed by the position before the sampled token: the anchor's for step 0.
    position = anchors.position[blocks.draft_request] + 1 + blocks.draft_step
    return draft_noise(seeds[blocks.draft_request], position, candidate_ids)
