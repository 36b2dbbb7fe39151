"""Calibration that follows the workload: a running refit from what verification reveals.

Beyond the paper, which calibrates once, before serving (Appendix B), and names an unknown
workload as its remaining headroom. Each verified draft says which of its tokens were
accepted, so scale and bias of the pre-draft entries and the post-draft temperatures can be
refitted while serving, by logistic regression with a fading memory.

What verification reveals is censored. Of a draft of d tokens, v were verified and a
accepted: positions 1 to a were accepted, a + 1 was rejected where a < v, and past v nothing
is known. Which positions are verified was decided by the post-draft logits, so

- given those logits, what was verified is a fair sample for the temperatures;
- it is not for the pre-draft entries, which would learn from confident drafts only. There a
  position that was reached but not verified (a = v) counts with the post-draft estimate as
  its outcome, weighted by the probability of being reached: the E step of an EM fit.

Only verified outcomes of former steps are read, so no draft's fate depends on itself. The
tensors that the engine reads are changed in place; nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forespark.fore_d.survival import row_offset

# Parameters stay within this much of the static fit: scale and temperature by a factor,
# bias by a sum. A fit that wants to leave it has met outcomes that no calibration explains.
SCALE_ROOM, BIAS_ROOM = 4.0, 4.0


@dataclass
class Memory:
    """How fast the refit moves.

    Attributes:
        samples: outcomes after which an older one counts 1/e; of each entry its own.
        prior: weight of the static fit, in outcomes; it never fades.
    """

    samples: float = 2000.0
    prior: float = 50.0

    def __post_init__(self) -> None:
        if self.samples <= 0 or self.prior <= 0:
            raise ValueError(
                f"memory: got samples {self.samples} and prior {self.prior}, want both above 0"
            )


def outcomes(
    lengths: torch.Tensor,  # [R] d, 0 for a request without a draft
    verified: torch.Tensor,  # [R] v <= d
    accepted: torch.Tensor,  # [R] a <= v
    survives: torch.Tensor,  # [R, K] sigmoid of the calibrated post-draft logits
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(happened, weight, known), each [R, K].

    ``happened`` is the outcome of a position given that those before were accepted, an
    estimate where ``known`` is False; ``weight`` the probability that it was reached, 0
    past the draft and behind a rejection.
    """
    K = survives.shape[1]
    step = torch.arange(K, device=survives.device)
    d, v, a = lengths[:, None], verified[:, None], accepted[:, None]
    known = (step <= a) & (step < v)
    guessed = (a == v) & (step >= v) & (step < d)
    alive = torch.where(guessed, survives, 1.0).cumprod(dim=1)
    reached = torch.cat((torch.ones_like(alive[:, :1]), alive[:, :-1]), dim=1)
    weight = known.to(survives.dtype) + guessed * reached
    happened = torch.where(known, (step < a).to(survives.dtype), survives)
    return happened, weight, known


class OnlineCalibration:
    """Refits ``scale`` and ``bias`` [T] and ``theta`` [K] in place.

    Args:
        slots: request slots of the engine.
        form: ``triangle`` or ``row``, the layout of scale and bias.
        memory: see ``Memory``.
    """

    def __init__(
        self,
        slots: int,
        K: int,
        form: str,
        scale: torch.Tensor,
        bias: torch.Tensor,
        theta: torch.Tensor,
        memory: Memory,
    ) -> None:
        self.K, self.form, self.memory = K, form, memory
        self.scale, self.bias, self.theta = scale, bias, theta
        self.static = (scale.clone(), bias.clone(), 1.0 / theta)
        device = scale.device
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.z = torch.zeros(slots, K, device=device)
        self.post_logits = torch.zeros(slots, K, device=device)
        # Curvature of what is remembered: [T] entries of a symmetric 2 x 2, and [K].
        self.pre_curvature = torch.zeros(3, len(scale), device=device)
        self.post_curvature = torch.zeros(K, device=device)
        offsets = [row_offset(max(d, 1), form) for d in range(K + 1)]
        self.offset = torch.tensor(offsets, device=device)

    def forget(self, slot: int) -> None:
        """A request has left the slot; its last draft teaches nothing."""
        self.lengths[slot] = 0

    def remember(
        self,
        slots: torch.Tensor,  # [R] int64
        lengths: torch.Tensor,  # [R] d
        logits: torch.Tensor,  # [R, T] raw pre-draft logits in ``form``
        post_logits: torch.Tensor,  # [R, K] raw, 0 past d
    ) -> None:
        """Keep what was believed of the drafts just made, until they are verified."""
        step = torch.arange(self.K, device=logits.device)
        entry = (self.offset[lengths][:, None] + step).clamp(max=logits.shape[1] - 1)
        self.lengths[slots] = lengths
        self.z[slots] = logits.gather(1, entry)
        self.post_logits[slots] = post_logits

    def learn(
        self,
        slots: torch.Tensor,  # [R] int64
        sampled: torch.Tensor,  # [R] tokens emitted: 0 while prefilling, else a + 1
        rejected: torch.Tensor,  # [R] v - a
    ) -> None:
        """Refit by the outcomes of the drafts that this step has verified."""
        accepted = (sampled.to(torch.int64) - 1).clamp(min=0)
        verified = accepted + rejected.to(torch.int64)
        lengths = torch.where(sampled > 0, self.lengths[slots], 0)
        verified = torch.minimum(verified, lengths)
        accepted = torch.minimum(accepted, verified)
        z, post = self.z[slots], self.post_logits[slots]
        survives = torch.sigmoid(post / self.theta)
        happened, weight, known = outcomes(lengths, verified, accepted, survives)
        self._learn_theta(post, happened - survives, survives, known.to(post.dtype))
        self._learn_entries(z, happened, weight, lengths)

    def _learn_theta(
        self, logits: torch.Tensor, error: torch.Tensor, p: torch.Tensor, weight: torch.Tensor
    ) -> None:
        static = self.static[2]
        gradient = (weight * error * logits).sum(dim=0)
        curvature = (weight * p * (1 - p) * logits.square()).sum(dim=0)
        fade = torch.exp(-weight.sum(dim=0) / self.memory.samples)
        self.post_curvature.mul_(fade).add_(curvature)
        inverse = 1.0 / self.theta
        prior = self.memory.prior / 4  # curvature of as many undecided outcomes at logit 1
        gradient = gradient - (1 - fade) * prior * (inverse - static)
        inverse = inverse + gradient / (self.post_curvature + prior)
        inverse = torch.clamp(inverse, static / SCALE_ROOM, static * SCALE_ROOM)
        self.theta.copy_(1.0 / inverse)

    def _learn_entries(
        self,
        z: torch.Tensor,
        happened: torch.Tensor,
        weight: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        T = len(self.scale)
        step = torch.arange(self.K, device=z.device)
        entry = (self.offset[lengths][:, None] + step).clamp(max=T - 1)
        p = torch.sigmoid(self.scale[entry] * z + self.bias[entry])
        error, bend = weight * (happened - p), weight * p * (1 - p)
        terms = torch.stack((error * z, error, bend * z * z, bend * z, bend, weight))
        sums = torch.zeros(6, T, device=z.device)
        sums.index_add_(1, entry.reshape(-1), terms.reshape(6, -1).to(sums.dtype))
        fade = torch.exp(-sums[5] / self.memory.samples)
        self.pre_curvature.mul_(fade).add_(sums[2:5])
        prior = self.memory.prior / 4
        scale0, bias0, _ = self.static
        slope = sums[0] - (1 - fade) * prior * (self.scale - scale0)
        level = sums[1] - (1 - fade) * prior * (self.bias - bias0)
        # Newton's step of each entry: a 2 x 2 system.
        a, b, c = (
            self.pre_curvature[0] + prior,
            self.pre_curvature[1],
            self.pre_curvature[2] + prior,
        )
        det = a * c - b * b
        room = scale0 * SCALE_ROOM
        self.scale.add_((c * slope - b * level) / det).clamp_(scale0 / SCALE_ROOM, room)
        self.bias.add_((a * level - b * slope) / det)
        self.bias.clamp_(bias0 - BIAS_ROOM, bias0 + BIAS_ROOM)
