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

import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from forespark.fore_d.costs import CostTables, _interpolate


@dataclass(frozen=True, slots=True)
class Plan:
    """Totals of one step."""

    draft_total: int  # M = sum of d_i
    verify_total: int  # B <= M
    objective: float  # expected tokens per millisecond, by the scores
    drafter_tokens: int  # sum of (d_i + 1) over requests with d_i >= 1


def pool(
    g: np.ndarray,  # [R, K] scores
) -> tuple[np.ndarray, np.ndarray]:
    """Positive scores sorted descending [P], and those of position 1 alone [F]; float64.

    Equal scores need no further order: totals only depend on how many first positions
    are among the top M, and first positions win ties. A row counts up to its first NaN or
    score that is not positive, and never rises: a position cannot be drafted without those
    before it, so it is worth no more than they are (as in ``split``).
    """
    scores, first = _ascending(g)
    return scores[::-1].astype(np.float64), first[::-1].astype(np.float64)


def _ascending(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``pool`` the other way round, in the scores' own type: what the search reads."""
    scores, first = _positive(np.ascontiguousarray(g))
    # numpy sorts with vector instructions, numba does not.
    scores.sort()
    first.sort()
    return scores, first


@njit(cache=True)
def _positive(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positive scores of every row, lowered to the least before them; first positions."""
    R, K = g.shape
    scores, first = np.empty(R * K, g.dtype), np.empty(R, g.dtype)
    count, rows = 0, 0
    for r in range(R):
        if not (K > 0 and g[r, 0] > 0):  # not: NaN too
            continue
        least = g[r, 0]
        first[rows] = least
        rows += 1
        for j in range(K):
            if not g[r, j] > 0:
                break
            least = min(least, g[r, j])
            scores[count] = least
            count += 1
    return scores[:count], first[:rows]


@njit(cache=True)
def _verify_price(
    total: int, buckets: np.ndarray, at: int, xs: np.ndarray, ys: np.ndarray, segment: int
) -> tuple[float, int, int]:
    """Milliseconds of a target forward; ``at`` and ``segment`` are where the last, smaller
    total was found in the buckets and between the measured points."""
    while at < len(buckets) and buckets[at] < total:
        at += 1
    padded = buckets[at] if at < len(buckets) else total
    ms, segment = _interpolate(xs, ys, float(padded), segment)
    return ms, at, segment


@njit(cache=True)
def _best(
    scores: np.ndarray,  # [P] ascending
    first: np.ndarray,  # [F] ascending
    n: int,
    N: int,
    draft_ms: np.ndarray,
    draft_padded: np.ndarray,
    xs: np.ndarray,
    ys: np.ndarray,
    buckets: np.ndarray,
    other: float,
) -> tuple[int, int, float, int]:
    """(M, B, objective, drafter tokens). ``rows`` counts the drafted requests of the top b,
    ``wide`` those of the top m: first positions lead their ties, so one as large as the
    m-th score is among the top m."""
    best_m, best_b, best, best_tokens = 0, 0, -1.0, 0
    top, lead = len(scores) - 1, len(first) - 1
    gain = float(n)
    rows, m, wide = 0, 0, 0
    at, segment = 0, 0
    for b in range(len(scores) + 1):
        if b > 0:
            score = scores[top + 1 - b]
            gain += score
            rows += lead >= rows and first[lead - rows] >= score
        if m < b:
            m, wide = b, rows
        room = draft_padded[b + rows]
        while m <= top:
            wider = wide + (lead >= wide and first[lead - wide] >= scores[top - m])
            if m + 1 + wider > room:
                break
            m, wide = m + 1, wider
        verify, at, segment = _verify_price(N + b, buckets, at, xs, ys, segment)
        value = gain / (draft_ms[m + wide] + verify + other)
        if value > best:
            best_m, best_b, best, best_tokens = m, b, value, m + wide
    return best_m, best_b, best, best_tokens


@njit(cache=True)
def _best_budget(
    scores: np.ndarray,  # [P] ascending
    present: int,
    n: int,
    N: int,
    xs: np.ndarray,
    ys: np.ndarray,
    buckets: np.ndarray,
    fixed: float,
) -> int:
    """``_best`` once the draft is made and paid for."""
    best_b, best = 0, -1.0
    gain = float(n)
    at, segment = 0, 0
    for b in range(min(len(scores), present) + 1):
        if b > 0:
            gain += scores[len(scores) - b]
        verify, at, segment = _verify_price(N + b, buckets, at, xs, ys, segment)
        value = gain / (verify + fixed)
        if value > best:
            best_b, best = b, value
    return best_b


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
    scores, first = _ascending(g)
    draft_ms, padded = costs.draft_arrays(len(scores) + len(first))
    xs, ys = costs.verify_knots(n)
    other = costs.other_ms(n) if price_other else 0.0
    m, b, value, tokens = _best(
        scores, first, n, N, draft_ms, padded, xs, ys, costs.verify_buckets, other
    )
    return Plan(m, b, value, tokens)


def plan_reference(
    g: np.ndarray,  # [n, K]
    n: int,
    N: int,
    costs: CostTables,
    price_other: bool = True,
) -> Plan:
    """Plain twin of ``plan``: every (M, B) pair, slow and readable."""
    ranked = []
    for r, row in enumerate(np.asarray(g, dtype=np.float64).tolist()):
        least = math.inf
        for j, score in enumerate(row):
            least = 0.0 if math.isnan(score) else min(least, score)
            if least <= 0:
                break
            ranked.append((-least, j, r))
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
    xs, ys = costs.verify_knots(n)
    fixed = costs.draft_ms(drafter_tokens) + (costs.other_ms(n) if price_other else 0.0)
    ranked = _ascending(scores)[0]
    buckets = costs.verify_buckets
    return int(_best_budget(ranked, max(drafts_present, 0), n, N, xs, ys, buckets, fixed))
