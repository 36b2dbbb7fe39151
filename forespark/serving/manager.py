"""Budget manager: ForeSpark's place in vLLM's adaptive verification.

vLLM asks this object, before each verification, how many draft tokens the step may hold
(``get_num_tokens``), and on the device which ones (``reallocate_drafts``). The stock
manager answers both from one confidence per slot and assumes K drafts per request; this
one knows each draft's own length, takes B from the joint schedule and distributes it by
post-draft survival with the documented tie rule. Rejection sampling is untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from forespark.fore_d.online import OnlineCalibration
from forespark.fore_d.split import distribute
from forespark.serving.planner import Planner


class BudgetManager(AdaptiveVerificationManager):
    """See the module docstring. Built after the KV cache, when vLLM builds its own."""

    def __init__(
        self,
        planner: Planner,
        req_states: Any,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int,
        max_total_logits: int,
    ) -> None:
        super().__init__(req_states, query_start_loc, num_bonus_tokens, max_total_logits)
        self.planner = planner
        slots, K = req_states.max_num_reqs, self.num_speculative_steps
        self.survival = torch.zeros(slots, K, dtype=torch.float32, device=req_states.device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=req_states.device)
        self.verified = torch.zeros(0, dtype=torch.int64)  # [R] of the last verification
        # Of the step being prepared: its requests, their plain tokens and drafts scheduled.
        self._asked: list[str] = []
        self.online: OnlineCalibration | None = None
        self._plain = self._scheduled = np.zeros(0, dtype=np.int64)

    def add_request(self, req_idx: int) -> None:
        self.planner.forget(req_idx)
        if self.online is not None:
            self.online.forget(req_idx)
        self.lengths[req_idx] = 0

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Nothing: prices come from ``latency.json``."""
        yield from ()

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Prices come from ``latency.json``; start-up timings are not used."""

    def record_drafts(
        self,
        idx_mapping: torch.Tensor,  # [R]
        slots: np.ndarray,  # [R]
        lengths: torch.Tensor,  # [R] d_i
        survival: torch.Tensor,  # [R, K] post-draft survival, 0 past d_i
    ) -> None:
        """Keep the drafts just made, by slot, until they are verified."""
        index = idx_mapping.to(torch.int64)
        self.survival[index] = survival
        self.lengths[index] = lengths
        self.planner.survival.send(slots, survival)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """The speculator recorded its drafts itself (``record_drafts``)."""

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Tokens of this step once the draft budget is B (vLLM's hook, before dispatch)."""
        # map() and bound methods: a generator costs as much again per request.
        req_ids = list(num_tokens_per_req)
        count = len(req_ids)
        tokens = np.fromiter(num_tokens_per_req.values(), np.int64, count)
        drafts = map(draft_tokens.get, req_ids, repeat(()))
        scheduled = np.fromiter(map(len, drafts), np.int64, count)
        slot_of = self.req_states.req_id_to_index
        slots = np.fromiter(map(slot_of.__getitem__, req_ids), np.int64, count)
        plain = tokens - scheduled
        limits, present = self.planner.drafts.present(slots, scheduled)
        computed = self.req_states.num_computed_tokens_np[slots] + plain
        n = int(np.count_nonzero(computed >= self.req_states.prefill_len.np[slots]))
        room = max(0, self._max_total_logits - count * self.num_bonus_tokens)
        non_draft = int(plain.sum())
        budget = min(self.planner.budget(slots, limits, n, non_draft, present), room)
        self._asked, self._plain, self._scheduled = req_ids, plain, scheduled
        unread: dict[str, int] = {}  # vLLM's own methods read the last part only
        self._batch_budget = (unread, unread, budget)
        return non_draft + budget

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Give each request its share of B; rewrite the query and logits boundaries."""
        assert self._batch_budget is not None
        budget = self._batch_budget[2]
        device = self.survival.device
        count = len(req_ids)
        row_of = dict(zip(self._asked, range(count), strict=True))
        rows = np.fromiter(map(row_of.__getitem__, req_ids), np.int64, count)
        plain = async_tensor_h2d(self._plain[rows], device=device)
        scheduled = async_tensor_h2d(self._scheduled[rows], device=device)
        index = idx_mapping.to(torch.int64)
        survival = self.planner.floors.favour(self.survival[index])
        self.verified = distribute(survival, torch.minimum(self.lengths[index], scheduled), budget)
        self._cu_num_logits[:1].zero_()
        self._cu_num_logits[1 : count + 1] = torch.cumsum(
            self.verified + self.num_bonus_tokens, 0
        ).to(self._cu_num_logits.dtype)
        boundaries = torch.cumsum(self.verified + plain, 0).to(self.query_start_loc.dtype)
        self.query_start_loc[:1].zero_()
        self.query_start_loc[1 : count + 1] = boundaries
        self.query_start_loc[count + 1 :].fill_(int(self._plain.sum()) + budget)
        return self._cu_num_logits[: count + 1], self.query_start_loc, budget
