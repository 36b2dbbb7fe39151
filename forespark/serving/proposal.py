"""What one ``propose`` produced. Shapes: R = requests, K = largest draft length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forespark.fore_d.survival import row_offset


@dataclass
class Scored:
    """Pre-draft estimate of a batch.

    Attributes:
        logits: [R, T] raw pre-draft logits z (triangle or row form).
        scores: [R, K] float32 scores g.
        bad: [R] bool, estimates that held a NaN.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    bad: torch.Tensor


@dataclass
class Lengths:
    """Draft lengths [R] of a batch and what the host knows of them; see ``Proposal``."""

    device: torch.Tensor
    host: np.ndarray | None
    num_drafts: int
    num_tokens: int

    @classmethod
    def known(cls, host: np.ndarray, device: torch.Tensor) -> Lengths:
        """Lengths that the host chose, or can read for nothing."""
        drafts = int(host.sum())
        return cls(device, host, drafts, drafts + int(np.count_nonzero(host)))

    @classmethod
    def split_on_device(cls, device: torch.Tensor, limits: np.ndarray, total: int) -> Lengths:
        """``total`` drafts that the device gave out: at most one anchor for each of them."""
        drafts = min(total, int(limits.sum()))
        return cls(device, None, drafts, drafts + min(drafts, int(np.count_nonzero(limits))))


@dataclass
class Proposal:
    """Drafts of a batch.

    Attributes:
        lengths: [R] int64 draft lengths d_i.
        lengths_host: the same on the host; None where only the device knows them.
        num_drafts: M, the sum of d_i.
        num_tokens: tokens of the drafter's pass: the sum of d_i + 1 over drafted requests, or
            a bound of it where the host does not know how many requests are drafted.
        tokens: [R, K] int64 draft tokens, 0 past d_i.
        post_logits: [R, K] float32 post-draft logits, 0 past d_i.
        survival: [R, K] float32 calibrated post-draft survival, 0 past d_i.
        scored: the pre-draft estimate that led to the lengths; None when none was made.
        form: of ``scored.logits``, triangle or row.
    """

    lengths: torch.Tensor
    lengths_host: np.ndarray | None
    num_drafts: int
    num_tokens: int
    tokens: torch.Tensor
    post_logits: torch.Tensor
    survival: torch.Tensor
    scored: Scored | None
    form: str

    @classmethod
    def empty(cls, lengths: Lengths, K: int, scored: Scored | None, form: str) -> Proposal:
        """A proposal with lengths but no drafts yet."""
        shape = (lengths.device.shape[0], K)
        device = lengths.device.device
        return cls(
            lengths=lengths.device,
            lengths_host=lengths.host,
            num_drafts=lengths.num_drafts,
            num_tokens=lengths.num_tokens,
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            post_logits=torch.zeros(shape, dtype=torch.float32, device=device),
            survival=torch.zeros(shape, dtype=torch.float32, device=device),
            scored=scored,
            form=form,
        )

    def on_host(self) -> np.ndarray:
        """[R] lengths, where whoever walks drafts has seen to it that the host knows them."""
        assert self.lengths_host is not None, "only the device knows these lengths"
        return self.lengths_host

    def logged(self, index: int) -> tuple[int, list[float], list[float]]:
        """(d, pre-draft logits of row d, post-draft logits) of one request, for traces."""
        assert self.scored is not None, "detailed traces make an estimate in every step"
        d = int(self.lengths[index])
        start = row_offset(d, self.form) if d > 0 else 0
        z = self.scored.logits[index, start : start + d].tolist()
        return d, z, self.post_logits[index, :d].tolist()
