"""The joint schedule: how many tokens to draft and how many to verify (Section 4.3).

Maximises Eq. (4) with every part of the step priced,

    (n + sum of the B largest g) / (T_draft(sum(d_i + 1)) + T_verify(N + B) + T_other(n))

over M = sum of d and B <= M. D is the top-M pooled scores (ties: smaller position, then
lower request), so M alone fixes the drafted requests P(M) and the drafter tokens
M + P(M). M and B stop at the last positive score.

Prices never fall, so for one B only the draft bucket that holds M = B can win: a larger
one costs more and adds nothing to the numerator. Inside it the largest schedule is
taken, which is the paper's free over-drafting; where every token is its own bucket
(CPU), M = B. Walking B upwards with M following is therefore the whole grid of bucket
pairs in one pass: a smaller B in the same verify bucket is seen too, and loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from forespark.fore_d.costs import CostTables, _interpolate, _pad


@dataclass(frozen=True, slots=True)
class Plan:
    """Totals of one step."""

    draft_total: int  # M = sum of d_i
    verify_total: int  # B <= M
    objective: float  # expected tokens per millisecond, by the scores
    drafter_tokens: int  # sum of (d_i + 1) over requests with d_i >= 1


def pool(
    g: np.ndarray,  # [R, K] scores, rows non-increasing
) -> tuple[np.ndarray, np.ndarray]:
    """Positive scores sorted descending [P], and those of position 1 alone [F].

    Equal scores need no further order: totals only depend on how many first positions
    are among the top M, and first positions win ties. NaN counts as 0.
    """
    flat = np.sort(g, axis=None)
    if flat.size and np.isnan(flat[-1]):
        g = np.nan_to_num(g, nan=0.0)
        flat = np.sort(g, axis=None)
    first = np.sort(g[:, 0]) if g.size else flat
    cut = np.searchsorted(flat, 0.0, side="right")
    cut_first = np.searchsorted(first, 0.0, side="right")
    return flat[cut:][::-1].astype(np.float64), first[cut_first:][::-1].astype(np.float64)


@njit(cache=True)
def _tokens_by_total(ranked: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Drafter tokens M + P(M) of the top-M schedule for M = 0..P."""
    tokens = np.zeros(len(ranked) + 1, dtype=np.int64)
    drafted = 0
    for m in range(1, len(ranked) + 1):
        # First positions lead their ties, so one as large as the m-th score is in.
        if drafted < len(first) and first[drafted] >= ranked[m - 1]:
            drafted += 1
        tokens[m] = m + drafted
    return tokens


@njit(cache=True)
def _best(
    ranked: np.ndarray,  # [P] descending
    tokens: np.ndarray,  # [P + 1]
    n: int,
    N: int,
    draft_ms: np.ndarray,
    draft_padded: np.ndarray,
    xs: np.ndarray,
    ys: np.ndarray,
    buckets: np.ndarray,
    other: float,
) -> tuple[int, int, float]:
    best_m, best_b, best = 0, 0, -1.0
    gain = float(n)
    m = 0
    segment = 0
    for b in range(len(ranked) + 1):
        if b > 0:
            gain += ranked[b - 1]
        m = max(m, b)
        room = draft_padded[tokens[b]]
        while m < len(ranked) and tokens[m + 1] <= room:
            m += 1
        verify, segment = _interpolate(xs, ys, float(_pad(buckets, N + b)), segment)
        value = gain / (draft_ms[tokens[m]] + verify + other)
        if value > best:
            best_m, best_b, best = m, b, value
    return best_m, best_b, best


def plan(
    g: np.ndarray,  # [n, K] scores on the host, float32; zero rows draft nothing
    n: int,  # requests that sample this step
    N: int,  # non-speculative tokens
    costs: CostTables,
    price_other: bool = True,
) -> Plan:
    """Best totals by Eq. (4); ``price_other=False`` is its literal denominator.

    Ties go to the smaller B, then to the smaller draft bucket.
    """
    assert g.ndim == 2, g.shape
    assert min(n, N) >= 0, (n, N)
    ranked, first = pool(g)
    tokens = _tokens_by_total(ranked, first)
    draft_ms, padded = costs.draft_arrays(int(tokens[-1]))
    xs, ys = costs.verify_knots(n)
    other = costs.other_ms(n) if price_other else 0.0
    m, b, value = _best(ranked, tokens, n, N, draft_ms, padded, xs, ys, costs.verify_buckets, other)
    return Plan(m, b, value, int(tokens[m]))


def plan_reference(
    g: np.ndarray,  # [n, K]
    n: int,
    N: int,
    costs: CostTables,
    price_other: bool = True,
) -> Plan:
    """Plain twin of ``plan``: every (M, B) pair, slow and readable."""
    ranked = [
        (-float(score), j, r)
        for r, row in enumerate(np.nan_to_num(np.asarray(g, dtype=np.float64), nan=0.0))
        for j, score in enumerate(row)
        if score > 0
    ]
    ranked.sort()
    other = costs.other_ms(n) if price_other else 0.0
    tokens = [0]
    for _, j, _ in ranked:
        tokens.append(tokens[-1] + (2 if j == 0 else 1))
    best: tuple[tuple[float, int, int, int], Plan] | None = None
    gain = float(n)
    for B in range(len(ranked) + 1):
        gain += -ranked[B - 1][0] if B else 0.0
        verify = costs.verify_ms(N + B, n)
        for M in range(B, len(ranked) + 1):
            value = gain / (costs.draft_ms(tokens[M]) + verify + other)
            bucket = int(costs.draft_arrays(tokens[M])[1][tokens[M]])
            rank = (value, -B, -bucket, M)
            if best is None or rank > best[0]:
                best = (rank, Plan(M, B, value, tokens[M]))
    assert best is not None
    return best[1]


def replan_budget(
    scores: np.ndarray,  # [n, K] scores or survival of the drafted positions, zeros elsewhere
    n: int,
    N: int,  # the verification step's actual non-speculative tokens
    costs: CostTables,
    drafts_present: int,  # drafted tokens still there
    drafter_tokens: int,  # already spent, priced as such
    price_other: bool = True,
) -> int:
    """B recomputed once N is known: at most the drafts present (Section 5).

    The draft price is fixed by now but stays in the denominator, since it belongs to
    the step whose rate is maximised.
    """
    ranked = pool(scores)[0][: max(drafts_present, 0)]
    xs, ys = costs.verify_knots(n)
    fixed = costs.draft_ms(drafter_tokens) + (costs.other_ms(n) if price_other else 0.0)
    # Zero drafter tokens for every B leave the fixed price as the only draft cost.
    free = np.zeros(len(ranked) + 1, dtype=np.int64)
    nothing = np.zeros(1, dtype=np.int64)
    return int(
        _best(ranked, free, n, N, np.zeros(1), nothing, xs, ys, costs.verify_buckets, fixed)[1]
    )
