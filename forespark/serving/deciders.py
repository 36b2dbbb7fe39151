"""Host decisions of one decode step, stock vLLM's and ours, to be timed without an engine.

Both managers are the classes that serve, on a batch of made-up request states: every
request decodes and has K drafts present. ``get_num_tokens`` reads host arrays and launches
no kernel, so it is the same code on any device, with or without our CPU kernel twins; only
vLLM's CPU worker must have been imported, whose stand-ins for streams and events the
managers' constructors need where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from forespark.fore_d.costs import CostTables

NO_LIMIT = 1 << 30  # logits that rejection sampling may hold at once


def step_deciders(
    scores: np.ndarray,  # [n, K] float32 pre-draft scores
    acceptance: np.ndarray,  # [n, K] acceptance probability of each draft position
    costs: CostTables,
) -> dict[str, Callable[[], int]]:
    """Calls that decide one step of this batch; each returns the draft tokens verified.

    ``stock``: vLLM's ``AdaptiveVerificationManager.get_num_tokens``. ``step``: all that our
    host decides where the device ranks, the draft total and B (``Planner``,
    ``BudgetManager.get_num_tokens``). ``step_host_split``: the same and each draft's length
    (``serve.split=host``, and any CPU).
    """
    device = torch.device("cpu")
    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu_worker  # noqa: F401  (adapts torch to the CPU)
    n, K = scores.shape
    tokens, drafts = _batch(n, K)
    stock = _stock_manager(n, K, acceptance, costs, device)
    ours = _our_manager(n, K, scores, costs, device)
    planner, slots, samples = ours.planner, np.arange(n), np.ones(n, dtype=bool)
    limits = np.full(n, K)

    def decide_stock() -> int:
        return stock.get_num_tokens(tokens, drafts) - n

    def decide() -> int:
        planner.draft_lengths_total(slots, samples)
        return ours.get_num_tokens(tokens, drafts) - n

    def decide_and_split() -> int:
        total = planner.draft_lengths_total(slots, samples)
        planner.split_on_host(slots, limits, total)
        return ours.get_num_tokens(tokens, drafts) - n

    return {"stock": decide_stock, "step": decide, "step_host_split": decide_and_split}


def _batch(n: int, K: int) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Scheduled tokens and draft tokens by request, as the scheduler hands them over."""
    names = [f"cmpl-{i:032x}-0" for i in range(n)]
    return dict.fromkeys(names, 1 + K), {name: list(range(K)) for name in names}


def _request_states(n: int, K: int, device: torch.device) -> Any:
    """What the managers read of vLLM's request states, for n decoding requests."""
    names = _batch(n, K)[0]
    return SimpleNamespace(
        max_num_reqs=n,
        num_speculative_steps=K,
        device=device,
        max_num_batched_tokens=n * (1 + K),
        req_id_to_index={name: slot for slot, name in enumerate(names)},
        num_computed_tokens_np=np.full(n, 300, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.full(n, 200, dtype=np.int32)),
    )


def _stock_manager(
    n: int, K: int, acceptance: np.ndarray, costs: CostTables, device: torch.device
) -> Any:
    """vLLM's manager with these confidences and the same prices."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as stock

    starts = torch.zeros(n + 1, dtype=torch.int32, device=device)
    manager = stock.AdaptiveVerificationManager(_request_states(n, K, device), starts, 1, NO_LIMIT)
    manager._stale_confidences[manager._stale_idx].np[:] = acceptance
    points = sorted({1, *(int(x) for x in costs.verify_buckets if x <= n * (1 + K)), n * (1 + K)})
    manager.cost_tables = stock.build_cost_tables_from_curves(
        [(r, costs.draft_ms(r * (1 + K))) for r in sorted({1, n})],
        [(t, costs.verify_ms(t, n)) for t in points],
        n,
        n * (1 + K),
        int(costs.verify_buckets[-1]) if len(costs.verify_buckets) else 0,
    )
    return manager


def _our_manager(
    n: int, K: int, scores: np.ndarray, costs: CostTables, device: torch.device
) -> Any:
    """Our manager and planner, every estimate landed, whole blocks waiting to be verified."""
    from forespark.serving.manager import BudgetManager
    from forespark.serving.planner import Planner

    settings = {
        "draft": "planned",
        "verify": "adaptive",
        "price_other": True,
        "force_length": None,
        "prior_acceptance": 0.6,
    }
    planner = Planner(n, K, costs, settings, device)
    planner.scores.send(np.arange(n), torch.from_numpy(scores))
    planner.drafts.put(np.arange(n), np.full(n, K))
    planner.counters.drafter_tokens = n * (1 + K)
    starts = torch.zeros(n + 1, dtype=torch.int32, device=device)
    return BudgetManager(planner, _request_states(n, K, device), starts, 1, NO_LIMIT)
