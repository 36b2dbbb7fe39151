"""Shared instances: price tables and survival triangles with known shape."""

from __future__ import annotations

import numpy as np

from forespark.fore_d.costs import CostTables

GRAPHS = [2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def tables(
    draft_base: float = 4.0,
    draft_slope: float = 0.15,
    verify_base: float = 20.0,
    verify_slope: float = 0.8,
    stepwise: bool = False,
) -> CostTables:
    """Linear prices (ms), exact at every token on a CPU, on graph sizes when stepwise."""
    tokens = np.array(GRAPHS if stepwise else [1, 8, 64, 512])
    batch = np.array([1, 2, 4, 16, 64])
    each = np.array([0, 1, 2, 4, 8])
    return CostTables(
        draft_tokens=tokens,
        draft_points_ms=draft_base + draft_slope * tokens,
        verify_batches=batch,
        verify_per_request=each,
        verify_points_ms=verify_base + verify_slope * batch[:, None] * (1 + each),
        other_batches=[1, 64],
        other_points_ms=[1.0, 2.0],
        draft_stepwise=stepwise,
        verify_buckets=GRAPHS if stepwise else [],
    )


def random_tables(rng: np.random.Generator) -> CostTables:
    return tables(
        draft_base=rng.uniform(0.1, 8),
        draft_slope=rng.uniform(0, 1),
        verify_base=rng.uniform(1, 40),
        verify_slope=rng.uniform(0.01, 4),
        stepwise=bool(rng.integers(2)),
    )


def random_survival(
    rng: np.random.Generator,
    n: int,
    K: int,
    row_noise: float = 0.15,
) -> np.ndarray:
    """Survival [n, K, K] of an estimator's kind: every request has its own acceptance
    logit that falls along the draft, and rows of different lengths nearly agree."""
    level = rng.normal(0.3, 1.3, (n, 1, 1)) - 0.25 * np.arange(K)
    logits = level + row_noise * rng.normal(size=(n, K, K))
    S = np.cumprod(1 / (1 + np.exp(-logits)), axis=2)
    return S * np.tril(np.ones((K, K)))


def device_like_tables(rng: np.random.Generator) -> CostTables:
    """Prices with the proportions of a real step, +-30 %.

    CPU: flat target step up to about 16 tokens, then milliseconds per token, a drafter
    at a quarter of the target's price. GPU: memory-bound target step, graph sizes, a
    drafter about a tenth of the target.
    """
    jitter = rng.uniform(0.7, 1.3, 4)
    batch, each = np.array([1, 2, 4, 8]), np.array([0, 1, 2, 4])
    tokens = batch[:, None] * (1 + each)
    if rng.integers(2):  # CPU
        draft = np.array([1, 2, 4, 8, 16, 24])
        draft_ms = 12 * jitter[0] + 1.1 * jitter[1] * draft
        verify_ms = 85 * jitter[2] + jitter[3] * (1.2 * tokens + 4.0 * np.maximum(tokens - 16, 0))
        return CostTables(draft, draft_ms, batch, each, verify_ms, [1, 8], [3.0, 5.0])
    draft = np.array([1, 2, 4, 8, 16, 24])
    draft_ms = 0.9 * jitter[0] + 0.004 * jitter[1] * draft
    verify_ms = 9.0 * jitter[2] + 0.012 * jitter[3] * tokens
    return CostTables(
        draft,
        draft_ms,
        batch,
        each,
        verify_ms,
        [1, 8],
        [0.5, 0.6],
        draft_stepwise=True,
        verify_buckets=[1, 2, 4, 8, 16, 24],
    )
