"""The ``exhaustive`` arm: the planner searches all schedules instead of ranking scores.

An optimality reference (Section 6.4): the same estimates, latency tables and engine, but the
host gets whole survival triangles, every step's lengths come from ``fore_d.search``, and B
is taken from the survival of the drafts that were made. The search grows with the cube of
the batch, so an engine that may hold too many requests is refused when it starts.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from forespark.fore_d.costs import CostTables
from forespark.fore_d.prior import fill_missing
from forespark.fore_d.search import check_batch, exhaustive
from forespark.fore_d.survival import survival
from forespark.serving.mailbox import Mailbox
from forespark.serving.planner import Planner


def check_arm(max_num_seqs: int, K: int, ranks: int = 1) -> None:
    """Refuse what the arm cannot serve: large batches, several ranks (ValueError)."""
    check_batch(max_num_seqs, K, "arm exhaustive, target.max_num_seqs")
    if ranks > 1:
        raise ValueError(
            f"arm exhaustive: got {ranks} tensor-parallel ranks, want one: survival triangles "
            "are not broadcast"
        )


class ExhaustivePlanner(Planner):
    """See the module docstring. Floors and minimum gains (``serve.min_*``) do not apply."""

    def __init__(
        self,
        max_num_reqs: int,
        K: int,
        costs: CostTables | None,
        settings: dict[str, Any],
        device: torch.device,
        lockstep: bool = False,
    ) -> None:
        check_arm(max_num_reqs, K, 2 if lockstep else 1)
        super().__init__(max_num_reqs, K, costs, settings, device, lockstep)
        self.triangles = Mailbox(max_num_reqs, K * K, device)
        self._found = np.zeros(0, dtype=np.int64)
        acceptance = np.float32(settings["prior_acceptance"])
        curve = np.cumprod(np.full(K, acceptance, dtype=np.float32))
        self._prior_triangle = np.tril(np.broadcast_to(curve, (K, K))).reshape(-1)

    def publish(
        self,
        slots: np.ndarray,  # [R]
        logits: torch.Tensor,  # [R, T] pre-draft logits
        estimators: Any,
    ) -> None:
        """Send this step's survival triangles to the host."""
        S, _ = survival(
            estimators.read(logits), estimators.scale, estimators.bias, self.K, estimators.form
        )
        self.triangles.send(slots, S.reshape(len(slots), -1))

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self.triangles.forget(slot)

    def draft_lengths_total(self, slots: np.ndarray, samples: np.ndarray, prefill: int = 0) -> int:
        n = int(np.count_nonzero(samples))
        if n == 0 or self.force_length is not None:
            return super().draft_lengths_total(slots, samples, prefill)
        began = time.perf_counter()
        self.same_length = None
        assert self.costs is not None
        S = self._triangles(slots[samples])
        lengths, _, _ = exhaustive(S, n + prefill, self.costs, self.price_other)
        self._found = np.zeros(len(slots), dtype=np.int64)
        self._found[samples] = lengths
        self.counters.planned_draft = int(self._found.sum())
        self.counters.plan_us = (time.perf_counter() - began) * 1e6
        return self.counters.planned_draft

    def split_on_host(self, slots: np.ndarray, limits: np.ndarray, total: int) -> np.ndarray:
        """[R] the lengths found, cut where the context ends."""
        return np.minimum(self._found, limits)

    def _triangles(self, slots: np.ndarray) -> np.ndarray:
        """[R, K, K] newest landed survival; the mean or the prior where none has landed."""
        self.triangles.receive()
        rows, known = self.triangles.rows[slots], self.triangles.known[slots]
        return fill_missing(rows, known, self._prior_triangle).reshape(-1, self.K, self.K)

    def _host_scores(self, slots: np.ndarray) -> np.ndarray:
        """[R, K] survival of each request's draft waiting to be verified, for B."""
        made = np.maximum(self.drafts.lengths[slots], 1) - 1
        return self._triangles(slots)[np.arange(len(slots)), made]
