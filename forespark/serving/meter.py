"""Step meter: what each engine step drafted, verified, accepted and cost.

One record per step goes to the trace file (``serve.trace``), sums go to Prometheus. The
meter serves every arm, stock ones too, so that arms are compared by the same clock.

Trace lines (JSON): a header ``{"header": {...}}`` first, then per step ``step``, ``t``
(monotonic seconds), ``n`` requests that sampled, ``N`` non-speculative tokens, ``B`` draft
tokens verified, ``scheduled`` drafts present before trimming, ``planned_draft``,
``drafted`` = sum of d_i, ``drafter_tokens`` = tokens the drafter's forward processed,
``prefill`` tokens, ``verify_ms`` (batch preparation, target forward, sampling),
``draft_ms``, ``other_ms`` (host time since the previous step; null after idling),
``plan_us``, ``bad_estimates`` (NaN estimates so far); with ``serve.trace_detail`` also
``requests``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forespark.serving.counters import Counters
from forespark.serving.trace import TraceWriter


@dataclass
class _Step:
    began: float
    draft_began: float = 0.0
    draft_ended: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)


class StepMeter:
    """Times and counts the steps of one model runner.

    On a CPU the clock is exact. On a GPU, where a step is only launched here, times are
    those of the host until device events replace them; counts are exact on both.
    """

    def __init__(self, runner: Any, settings: dict[str, Any]) -> None:
        self.runner = runner
        self.K = runner.num_speculative_steps
        self.detail = bool(settings["trace_detail"])
        path = settings["trace"]
        self.trace = None if path is None else TraceWriter(Path(path), settings, self.K)
        self.counters = Counters(settings["arm"])
        self.steps: list[dict[str, Any]] | None = None  # in-process readers set a list
        self._index = 0
        self._step: _Step | None = None
        self._last_end: float | None = None
        self._last_ids: set[str] = set()
        self._offered: dict[str, dict[str, Any]] = {}
        self._anchors: list[int] = []  # anchor position of each request of the batch

    @property
    def planner(self) -> Any:
        return getattr(self.runner.speculator, "planner", None)

    def step_starts(self) -> None:
        self._step = _Step(time.perf_counter())

    def sampled(self, batch: Any, num_sampled: Any, num_rejected: Any) -> None:
        """After rejection sampling: how the drafts of this step fared."""
        if self._step is None:
            return
        verified = int(batch.num_draft_tokens)
        counts = num_sampled.cpu().numpy()[: batch.num_reqs]
        drafts = batch.num_draft_tokens_per_req
        scheduled = 0 if drafts is None else int(drafts.sum())
        planner = self.planner
        present = planner.counters.present if planner is not None else scheduled
        samples = counts > 0
        lengths = np.asarray(batch.num_scheduled_tokens[: batch.num_reqs])
        prefilling = batch.is_prefilling_np[: batch.num_reqs]
        accepted = np.maximum(counts - 1, 0)
        self._step.row = {
            "step": self._index,
            "t": self._step.began,
            "n": int(samples.sum()),
            "N": int(batch.num_tokens) - verified,
            "B": verified,
            "scheduled": present if drafts is not None else 0,
            "prefill": int(lengths[prefilling].sum()),
            "accepted": int(accepted.sum()),
            "batch": int(batch.num_reqs),
        }
        if self.detail and self.runner.adaptive_verification is not None:
            self._step.row["requests"] = self._graded(batch, accepted, drafts)
            rows = batch.query_start_loc[1 : batch.num_reqs + 1] - num_rejected - 1
            self._anchors = (batch.positions[rows.long()] + 1).tolist()

    def _graded(self, batch: Any, accepted: np.ndarray, drafts: Any) -> list[dict[str, Any]]:
        """Each request's draft offered at the previous step with its verdict."""
        graded = []
        starts = batch.query_start_loc[: batch.num_reqs].long()
        positions = batch.positions[starts].tolist()
        verified = self._verified(batch.num_reqs).tolist()
        for index, req_id in enumerate(batch.req_ids):
            offered = self._offered.pop(req_id, None)
            if offered is None or drafts is None or drafts[index] == 0:
                continue
            if offered["pos"] != positions[index]:
                continue  # preempted and recomputed in between
            graded.append(
                {"id": req_id, **offered, "v": verified[index], "a": int(accepted[index])}
            )
        return graded

    def _verified(self, count: int) -> Any:
        """[R] draft tokens verified of each request in the current step."""
        manager = self.runner.adaptive_verification
        return (
            manager.verified if self.planner is not None else manager._batch_draft_capacity[:count]
        )

    def draft_starts(self) -> None:
        if self._step is not None:
            self._step.draft_began = time.perf_counter()

    def draft_ends(self) -> None:
        if self._step is not None:
            self._step.draft_ended = time.perf_counter()

    def step_ends(self) -> None:
        """Close the step: complete its record, write and count it."""
        step, self._step = self._step, None
        if step is None or not step.row:
            return
        now = time.perf_counter()
        row = step.row
        if step.draft_began:
            row["verify_ms"] = (step.draft_began - step.began) * 1e3
            row["draft_ms"] = (step.draft_ended - step.draft_began) * 1e3
        else:
            row["verify_ms"], row["draft_ms"] = (now - step.began) * 1e3, 0.0
        row |= self._drafted(row)
        if self.detail and self.runner.adaptive_verification is not None:
            self._offer()
        ids = set(self._batch_ids)
        gap = None if self._last_end is None else (step.began - self._last_end) * 1e3
        # No request in common: the engine was idle in between, which is nobody's cost.
        row["other_ms"] = gap if ids & self._last_ids else None
        self._last_ids, self._last_end = ids, now
        self._index += 1
        if self.trace is not None:
            self.trace.write(row)
        if self.steps is not None:
            self.steps.append(row)
        self.counters.add(row)

    @property
    def _batch_ids(self) -> list[str]:
        return list(self.runner.draft_tokens_handler.req_ids) or list(
            self.runner.req_states.req_id_to_index
        )

    def _drafted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Draft totals of this step: planned ones for our arms, full blocks for stock."""
        planner = self.planner
        if planner is None:
            drafter = self.runner.speculator is not None
            width = self.K + int(not getattr(self.runner.speculator, "sample_from_anchor", False))
            count = row["batch"] if drafter else 0
            return {
                "planned_draft": count * self.K,
                "drafted": count * self.K,
                "drafter_tokens": count * width,
                "plan_us": 0.0,
            }
        counters = planner.counters
        return {
            "planned_draft": counters.planned_draft,
            "drafted": counters.drafted,
            "drafter_tokens": counters.drafter_tokens,
            "plan_us": counters.plan_us + counters.budget_us,
            "bad_estimates": counters.bad_estimates,
        }

    def _offer(self) -> None:
        """Remember each request's new draft until its verdict: length and logits."""
        speculator = self.runner.speculator
        live = self.runner.req_states.req_id_to_index
        self._offered = {name: kept for name, kept in self._offered.items() if name in live}
        if self.planner is None:
            confidences = speculator.draft_token_confidence_probs[: len(self._anchors)]
            drafts = [
                (self.K, None, row) for row in torch.logit(confidences.float(), eps=1e-7).tolist()
            ]
        else:
            drafts = [speculator.last.logged(i) for i in range(len(self._anchors))]
        for req_id, position, (d, z, post) in zip(
            self._batch_ids, self._anchors, drafts, strict=False
        ):
            if d > 0:
                self._offered[req_id] = {"pos": position, "d": d, "z": z, "l": post}
