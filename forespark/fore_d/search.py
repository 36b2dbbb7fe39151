"""Exhaustive search over all schedules, the optimum the joint schedule is held against.

Unlike the envelope, it values a schedule by each request's own length-d survival curve:
n plus the B largest survivals among the drafted positions (Section 6.4, Exhaustive).
Every length of every request and every B is weighed. ``exhaustive`` does so by dynamic
programming over (drafter tokens, verified drafts), which keeps the best of the schedules
that end in the same totals and so have the same price; ``exhaustive_reference`` lists all
(K + 1)^n of them. Both grow fast with the batch: small batches only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numba import njit

from forespark.fore_d.costs import CostTables

LIMIT = 200_000_000  # steps of the inner loop, a few tenths of a second


def schedule_value(
    survival: np.ndarray,  # [n, K, K]
    lengths: Sequence[int],  # [n]
    budget: int,
    N: int,
    costs: CostTables,
    price_other: bool = True,
) -> float:
    """Expected tokens per millisecond of drafting ``lengths`` and verifying ``budget``.

    Raises:
        ValueError: budget outside 0..sum of lengths.
    """
    if not 0 <= budget <= sum(lengths):
        raise ValueError(f"budget: got {budget}, want 0..{sum(lengths)} (drafted tokens)")
    n = len(lengths)
    drafted = _drafted(survival, lengths)
    tokens = sum(d + 1 for d in lengths if d)
    other = costs.other_ms(n) if price_other else 0.0
    step = costs.draft_ms(tokens) + costs.verify_ms(N + budget, n) + other
    return float((n + drafted[:budget].sum()) / step)


def _drafted(survival: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Survivals of all drafted positions, descending."""
    curves = [survival[i, d - 1, :d] for i, d in enumerate(lengths) if d]
    return np.sort(np.concatenate(curves))[::-1] if curves else np.zeros(0)


def most_requests(K: int) -> int:
    """Largest batch that ``exhaustive`` takes at draft length K."""
    n = 1
    while _work(n + 1, K) <= LIMIT:
        n += 1
    return n


def _work(n: int, K: int) -> int:
    """Steps of the inner loop: request i meets (i(K+1) + 1)(iK + 1) totals, K(K+1)/2 shares."""
    ones, squares = n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6
    return (K * (K + 1) * squares + (2 * K + 1) * ones + n) * K * (K + 1) // 2


def check_batch(n: int, K: int, what: str = "exhaustive search") -> None:
    """Refuse a batch that is too large to search (ValueError)."""
    if _work(n, K) > LIMIT:
        raise ValueError(
            f"{what}: got {n} requests with K={K}, want at most {most_requests(K)}: the search "
            "grows with the cube of the batch. Use fewer requests"
        )


def exhaustive(
    survival: np.ndarray,  # [n, K, K], no NaN, rows non-increasing
    N: int,
    costs: CostTables,
    price_other: bool = True,
) -> tuple[tuple[int, ...], int, float]:
    """Best (lengths, B, objective) over every length of every request and every B.

    Ties go to the smaller B, then to fewer drafter tokens.

    Raises:
        ValueError: more requests than ``most_requests``.
    """
    n, K = survival.shape[:2]
    assert n > 0
    check_batch(n, K)
    reward, choice = _best_rewards(np.ascontiguousarray(survival, dtype=np.float64))
    other = costs.other_ms(n) if price_other else 0.0
    draft = np.array([costs.draft_ms(t) for t in range(reward.shape[0])])
    verify = np.array([costs.verify_ms(N + b, n) for b in range(reward.shape[1])])
    # Transposed, the first of equal values has the smallest B.
    value = ((n + reward) / (draft[:, None] + verify + other)).T
    budget, tokens = np.unravel_index(int(value.argmax()), value.shape)
    lengths = _lengths(choice, int(tokens), int(budget))
    return tuple(lengths.tolist()), int(budget), float(value[budget, tokens])


@njit(cache=True)
def _best_rewards(survival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest sum of verified survivals for every (drafter tokens, verified drafts).

    Returns:
        reward: [n(K+1) + 1, nK + 1], -inf where no schedule has these totals.
        choice: [n, n(K+1) + 1, nK + 1] what request i does there, d(K+1) + b; 0 is nothing.
    """
    n, K = survival.shape[0], survival.shape[1]
    reward = np.full((n * (K + 1) + 1, n * K + 1), -np.inf)
    reward[0, 0] = 0.0
    choice = np.zeros((n, reward.shape[0], reward.shape[1]), dtype=np.int16)
    for i in range(n):
        better = reward.copy()
        seen = np.zeros(K + 1)  # largest reward of b verified drafts among shorter lengths
        for d in range(1, K + 1):
            gain = 0.0
            for b in range(1, d + 1):
                gain += survival[i, d - 1, b - 1]
                if gain <= seen[b]:
                    continue  # a shorter draft costs no more and brings as much
                seen[b] = gain
                code = d * (K + 1) + b
                for t in range(i * (K + 1) + 1):
                    for s in range(i * K + 1):
                        value = reward[t, s] + gain
                        if value > better[t + d + 1, s + b]:
                            better[t + d + 1, s + b] = value
                            choice[i, t + d + 1, s + b] = code
        reward = better
    return reward, choice


@njit(cache=True)
def _lengths(choice: np.ndarray, tokens: int, budget: int) -> np.ndarray:
    """Draft lengths [n] of the schedule kept for these totals."""
    n = choice.shape[0]
    K = (choice.shape[2] - 1) // n
    lengths = np.zeros(n, dtype=np.int64)
    for back in range(n):
        i = n - 1 - back
        code = choice[i, tokens, budget]
        lengths[i] = code // (K + 1)
        if code > 0:
            tokens -= lengths[i] + 1
            budget -= code % (K + 1)
    return lengths


def exhaustive_reference(
    survival: np.ndarray,  # [n, K, K], no NaN
    N: int,
    costs: CostTables,
    price_other: bool = True,
) -> tuple[tuple[int, ...], int, float]:
    """Plain twin of ``exhaustive``: one schedule after the other, (K + 1)^n of them."""
    n, K = survival.shape[:2]
    assert (K + 1) ** n <= 1_000_000, (n, K)
    best: tuple[tuple[int, ...], int, float] = ((0,) * n, 0, -1.0)
    for lengths in itertools.product(range(K + 1), repeat=n):
        for budget in range(sum(lengths) + 1):
            value = schedule_value(survival, lengths, budget, N, costs, price_other)
            if value > best[2]:
                best = (lengths, budget, value)
    return best
