"""Host side of the joint schedule: request slots, stale estimates, totals.

The host keeps one row of scores per request-state slot, the newest that have landed: on a
GPU those of an earlier step, on a CPU those of this step (see ``mailbox``). From them it
plans the totals and, under the host split, each draft's length. A slot without an
estimate uses the mean of the others (``fore_d.prior``). No tensor is waited for here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forespark.fore_d.costs import CostTables
from forespark.fore_d.prior import fill_missing, prior_scores
from forespark.fore_d.schedule import plan, replan_budget
from forespark.fore_d.split import top_prefix_host
from forespark.serving.caps import dense
from forespark.serving.drafts import DraftLengths
from forespark.serving.floors import Floors
from forespark.serving.mailbox import Mailbox
from forespark.serving.proposal import Lengths


@dataclass
class PlanCounters:
    """What the last step planned, for traces and metrics."""

    planned_draft: int = 0
    drafted: int = 0
    drafter_tokens: int = 0
    budget: int = 0
    present: int = 0
    plan_us: float = 0.0  # of the draft total
    budget_us: float = 0.0  # of B
    bad_estimates: int = 0


class Planner:
    """Totals of a batch, from host scores.

    Args:
        max_num_reqs: request-state slots.
        K: largest draft length.
        costs: latency tables; None when nothing is planned (forced lengths).
        settings: ``additional_config["forespark"]``.
        device: where estimates are made.
        lockstep: other ranks must read the same estimates at the same step (``mailbox``).
    """

    def __init__(
        self,
        max_num_reqs: int,
        K: int,
        costs: CostTables | None,
        settings: dict[str, Any],
        device: torch.device,
        lockstep: bool = False,
    ) -> None:
        self.K = K
        self.costs = costs
        self.draft_rule = settings["draft"]
        self.verify_rule = settings["verify"]
        self.price_other = bool(settings["price_other"])
        self.force_length: int | None = settings["force_length"]
        self.floors = Floors.of(settings)
        caps = settings.get("caps")
        self.caps = None if caps is None else dense(caps, max_num_reqs)
        # Length of every draft of the batch; None when lengths are ranked.
        self.same_length: int | None = None
        self.prior = prior_scores(float(settings["prior_acceptance"]), K)
        self.scores = Mailbox(max_num_reqs, K, device, lockstep=lockstep)
        # Post-draft survival and length of the drafts waiting to be verified, by slot.
        self.survival = Mailbox(max_num_reqs, K, device, lockstep=lockstep)
        self.drafts = DraftLengths(max_num_reqs, device, lockstep=lockstep)
        self.counters = PlanCounters()
        if costs is not None:
            # Compile (or load) the schedule now, not in the first request's step.
            self._warm_up(costs)

    def _warm_up(self, costs: CostTables) -> None:
        row = self.prior[None]
        plan(row, 1, 1, costs, self.price_other)
        replan_budget(row, 1, 1, costs, self.K, self.K + 1, self.price_other)

    def forget(self, slot: int) -> None:
        """A slot got a new request: nothing of the old one may be read."""
        self.scores.forget(slot)
        self.survival.forget(slot)
        self.drafts.forget(slot)

    def draft_lengths_total(self, slots: np.ndarray, samples: np.ndarray, prefill: int = 0) -> int:
        """Sum of d_i to draft now for the requests in ``slots`` that sample.

        Args:
            slots: [R] request-state slots in batch order.
            samples: [R] bool; False while still prefilling (drafts nothing).
            prefill: prompt tokens expected in the step that verifies.
        """
        began = time.perf_counter()
        n = int(np.count_nonzero(samples))
        self.same_length = self._same_length(n, len(slots))
        if n == 0:
            total = 0
        elif self.same_length is not None:
            total = n * self.same_length
        else:
            assert self.costs is not None
            scores = self._host_scores(slots[samples])
            total = self.floors.draft_total(scores, n + prefill, self.costs, self.price_other)
        self.counters.planned_draft = total
        self.counters.plan_us = (time.perf_counter() - began) * 1e6
        return total

    def _same_length(self, n: int, load: int) -> int | None:
        """Length of every draft when nothing is ranked.

        Args:
            n: requests that sample.
            load: requests in the batch, prefilling ones too, as vLLM counts for its caps.
        """
        if self.force_length is not None:
            return self.force_length
        if self.draft_rule == "capped":
            assert self.caps is not None
            return self.caps[load]
        full = self.draft_rule == "full" or n < self.floors.min_batch
        return self.K if full else None

    def _host_scores(self, slots: np.ndarray) -> np.ndarray:
        """[R, K] newest landed scores; the mean or the prior where none has landed."""
        self.scores.receive()
        return fill_missing(self.scores.rows[slots], self.scores.known[slots], self.prior)

    def split_on_host(self, slots: np.ndarray, limits: np.ndarray, total: int) -> np.ndarray:
        """[R] draft lengths of the planned total, ranked by host scores (host split).

        Args:
            limits: [R] largest length of each request, 0 for one that drafts nothing.
        """
        return top_prefix_host(self.floors.favour(self._host_scores(slots)), limits, total)

    def note_drafts(self, slots: np.ndarray, lengths: Lengths, limits: np.ndarray) -> None:
        """Drafts of ``lengths`` [R] are being made for ``slots`` [R] (``DraftLengths``)."""
        if lengths.host is not None:
            self.drafts.put(slots, lengths.host)
            return
        guess = self.split_on_host(slots, limits, lengths.num_drafts)
        self.drafts.send(slots, lengths.device, guess, limits, lengths.num_drafts)

    def budget(
        self, slots: np.ndarray, limits: np.ndarray, n: int, non_draft: int, present: int
    ) -> int:
        """B for the batch about to be verified, from its actual N and the drafts present.

        Args:
            slots: [R] request-state slots.
            limits: [R] draft tokens of each request that can still be verified, as far as the
                host knows.
            n: requests that sample in this step.
            non_draft: N.
            present: draft tokens in all that are there for certain; B stays within.
        """
        began = time.perf_counter()
        self.counters.present = present
        everything = self.verify_rule == "full" or self.force_length is not None
        if everything or self.costs is None or n < self.floors.min_batch:
            budget = present
        elif present == 0:
            budget = 0
        else:
            if self.draft_rule == "planned":
                rows = self._host_scores(slots)
            else:
                self.survival.receive()
                rows = fill_missing(
                    self.survival.rows[slots], self.survival.known[slots], self.prior
                )
            budget = self.floors.budget(
                rows,
                limits,
                n,
                non_draft,
                self.costs,
                self.counters.drafter_tokens,
                self.price_other,
            )
            budget = min(budget, present)
        self.counters.budget = budget
        self.counters.budget_us = (time.perf_counter() - began) * 1e6
        return budget
