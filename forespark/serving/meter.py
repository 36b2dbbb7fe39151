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

The host never waits for the device here: on a GPU a record is completed in a later step,
when the marks and counts of its own have landed. Detailed records are for calibration, and
do wait.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forespark.serving.clock import clock_of
from forespark.serving.counters import Counters
from forespark.serving.trace import TraceWriter


@dataclass
class _Step:
    """A step being measured, or one whose device values have yet to land.

    ``previous`` is the end of the step before, None after idling.
    """

    began: Any
    at: float  # monotonic seconds
    draft_began: Any = None
    draft_ended: Any = None
    ended: Any = None
    previous: Any = None
    counts: torch.Tensor | None = None  # [R] tokens sampled, on the host once ``ended`` passed
    row: dict[str, Any] = field(default_factory=dict)


class StepMeter:
    """Times and counts the steps of one model runner."""

    def __init__(self, runner: Any, settings: dict[str, Any]) -> None:
        self.runner = runner
        self.K = runner.num_speculative_steps
        self.detail = bool(settings["trace_detail"])
        path = settings["trace"]
        self.trace = None if path is None else TraceWriter(Path(path), settings, self.K)
        self.counters = Counters(settings["arm"])
        self.steps: list[dict[str, Any]] | None = None  # in-process readers set a list
        self.clock = clock_of(runner.device)
        self._index = 0
        self._step: _Step | None = None
        self._closed: deque[_Step] = deque()
        self._last_end: Any = None
        self._last_ids: set[str] = set()
        self._offered: dict[str, dict[str, Any]] = {}
        self._anchors: list[int] = []  # anchor position of each request of the batch

    @property
    def planner(self) -> Any:
        return getattr(self.runner.speculator, "planner", None)

    def step_starts(self) -> None:
        self._step = _Step(self.clock.mark(), time.perf_counter())

    def sampled(self, batch: Any, num_sampled: Any, num_rejected: Any) -> None:
        """After rejection sampling: how the drafts of this step fared."""
        if self._step is None:
            return
        verified = int(batch.num_draft_tokens)
        # Into pinned memory, behind this step's work; read once the step has ended.
        self._step.counts = num_sampled[: batch.num_reqs].to("cpu", non_blocking=True, copy=True)
        drafts = batch.num_draft_tokens_per_req
        scheduled = 0 if drafts is None else int(drafts.sum())
        planner = self.planner
        present = planner.counters.present if planner is not None else scheduled
        lengths = np.asarray(batch.num_scheduled_tokens[: batch.num_reqs])
        prefilling = batch.is_prefilling_np[: batch.num_reqs]
        self._step.row = {
            "step": self._index,
            "t": self._step.at,
            "N": int(batch.num_tokens) - verified,
            "B": verified,
            "scheduled": present if drafts is not None else 0,
            "prefill": int(lengths[prefilling].sum()),
            "batch": int(batch.num_reqs),
        }
        if self.detail and self.runner.adaptive_verification is not None:
            self.clock.wait(self.clock.mark())
            accepted = np.maximum(self._step.counts.numpy() - 1, 0)
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
            self._step.draft_began = self.clock.mark()

    def draft_ends(self) -> None:
        if self._step is not None:
            self._step.draft_ended = self.clock.mark()

    def step_ends(self) -> None:
        """Close the step, and complete the records whose device values have landed."""
        step, self._step = self._step, None
        if step is None or not step.row:
            return
        step.ended = self.clock.mark()
        step.row |= self._drafted(step.row)
        if self.detail and self.runner.adaptive_verification is not None:
            self._offer()
        ids = set(self._batch_ids)
        # No request in common: the engine was idle in between, which is nobody's cost.
        step.previous = self._last_end if ids & self._last_ids else None
        self._last_ids, self._last_end = ids, step.ended
        self._index += 1
        self._closed.append(step)
        while self._closed and self.clock.passed(self._closed[0].ended):
            self._complete(self._closed.popleft())

    def drain(self) -> None:
        """Complete every closed step's record, waiting for the device."""
        while self._closed:
            self.clock.wait(self._closed[0].ended)
            self._complete(self._closed.popleft())

    def _complete(self, step: _Step) -> None:
        """Write and count the record of a step that the device has finished."""
        row, ms = step.row, self.clock.ms
        assert step.counts is not None, "a step with a row has sampled"
        counts = step.counts.numpy()
        row["n"] = int(np.count_nonzero(counts > 0))
        row["accepted"] = int(np.maximum(counts - 1, 0).sum())
        drafted = step.draft_began is not None
        row["verify_ms"] = ms(step.began, step.draft_began if drafted else step.ended)
        row["draft_ms"] = ms(step.draft_began, step.draft_ended) if drafted else 0.0
        row["other_ms"] = None if step.previous is None else ms(step.previous, step.began)
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
