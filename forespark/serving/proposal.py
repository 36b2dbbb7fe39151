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
class Proposal:
    """Drafts of a batch.

    Attributes:
        lengths: [R] int64 draft lengths d_i.
        lengths_host: the same on the host.
        tokens: [R, K] int64 draft tokens, 0 past d_i.
        post_logits: [R, K] float32 post-draft logits, 0 past d_i.
        survival: [R, K] float32 calibrated post-draft survival, 0 past d_i.
        scored: the pre-draft estimate that led to the lengths; None when none was made.
        form: of ``scored.logits``, triangle or row.
    """

    lengths: torch.Tensor
    lengths_host: np.ndarray
    tokens: torch.Tensor
    post_logits: torch.Tensor
    survival: torch.Tensor
    scored: Scored | None
    form: str

    @property
    def widths(self) -> np.ndarray:
        """[R] packed drafter tokens of each request: d_i + 1, or 0."""
        return np.where(self.lengths_host > 0, self.lengths_host + 1, 0)

    @property
    def num_drafts(self) -> int:
        return int(self.lengths_host.sum())

    @property
    def num_tokens(self) -> int:
        return int(self.widths.sum())

    @classmethod
    def empty(
        cls,
        lengths: torch.Tensor,
        lengths_host: np.ndarray,
        K: int,
        scored: Scored | None,
        form: str,
    ) -> Proposal:
        """A proposal with lengths but no drafts yet."""
        shape = (lengths.shape[0], K)
        device = lengths.device
        return cls(
            lengths=lengths,
            lengths_host=lengths_host,
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            post_logits=torch.zeros(shape, dtype=torch.float32, device=device),
            survival=torch.zeros(shape, dtype=torch.float32, device=device),
            scored=scored,
            form=form,
        )

    def logged(self, index: int) -> tuple[int, list[float], list[float]]:
        """(d, pre-draft logits of row d, post-draft logits) of one request, for traces."""
        assert self.scored is not None, "detailed traces make an estimate in every step"
        d = int(self.lengths_host[index])
        start = row_offset(d, self.form) if d > 0 else 0
        z = self.scored.logits[index, start : start + d].tolist()
        return d, z, self.post_logits[index, :d].tolist()
