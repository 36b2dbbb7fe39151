"""Switches that hold the joint schedule back; each is off at 0.

``min_gain``: a plan that promises less than this share more tokens per millisecond than
full blocks is not followed: drafts are shortened, and later trimmed, only for at least
that much. ``min_batch``: below this many requests nothing is planned. ``min_draft``:
every request drafts and verifies at least so many tokens (paper, Section 7, Fairness:
the global ranking may leave a request undrafted step after step).

They change totals and who is served first. What verification accepts is untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from forespark.fore_d.costs import CostTables
from forespark.fore_d.schedule import plan, pool, replan_budget

LIFTED = 2.0  # above every score and survival, which are at most 1
Values = TypeVar("Values", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Floors:
    """The three switches, and the totals of a batch under them."""

    min_gain: float = 0.0
    min_batch: int = 0  # requests
    min_draft: int = 0  # tokens per request

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Floors:
        """From ``additional_config["forespark"]``."""
        names = ("min_gain", "min_batch", "min_draft")
        return cls(**{name: settings[name] for name in names if name in settings})

    def favour(self, values: Values) -> Values:
        """[R, K] scores with every request's first ``min_draft`` ahead of all others."""
        if self.min_draft == 0:
            return values
        lifted = values.clone() if isinstance(values, torch.Tensor) else values.copy()
        lifted[:, : self.min_draft] = LIFTED
        return lifted

    def draft_total(
        self,
        g: np.ndarray,  # [n, K] scores of the requests that sample
        N: int,
        costs: CostTables,
        price_other: bool = True,
    ) -> int:
        """Sum of d_i: the joint schedule's, or n * K where shortening gains too little.

        Shortening is compared with full blocks verified as far as it pays, the choice
        that is left once full blocks are drafted.
        """
        n, K = g.shape
        if self.min_draft == 0:
            best = plan(g, n, N, costs, price_other)
            total, value = best.draft_total, best.objective
        else:
            total, value = self._joint(g, N, costs, price_other)
        if self.min_gain == 0:
            return total
        limits = np.full(n, K)
        _, full = self._trimmed(g, limits, n, N, costs, n * (K + 1), price_other)
        return total if value >= (1 + self.min_gain) * full else n * K

    def budget(
        self,
        rows: np.ndarray,  # [R, K] scores or survival of the drafts that may be verified
        limits: np.ndarray,  # [R] drafts present
        n: int,  # requests that sample
        N: int,
        costs: CostTables,
        drafter_tokens: int,  # already spent
        price_other: bool = True,
    ) -> int:
        """B: the best one, or all drafts present where trimming gains too little."""
        inside = np.arange(rows.shape[1]) < limits[:, None]
        drafted = np.where(inside, rows, rows.dtype.type(0))
        if self.min_gain == 0 and self.min_draft == 0:
            present = int(limits.sum())
            return replan_budget(drafted, n, N, costs, present, drafter_tokens, price_other)
        return self._trimmed(drafted, limits, n, N, costs, drafter_tokens, price_other)[0]

    def _joint(
        self, g: np.ndarray, N: int, costs: CostTables, price_other: bool
    ) -> tuple[int, float]:
        """(sum of d_i, rate) of the best schedule that gives everyone ``min_draft``.

        As ``fore_d.schedule.plan``: the draft total fills the draft bucket of its B.
        """
        n, least = len(g), min(self.min_draft, g.shape[1])
        ranked = pool(g[:, least:])[0]
        # Every request is drafted, so a further token costs no further anchor.
        tokens = n * (least + 1) + np.arange(len(ranked) + 1)
        draft_ms, padded = costs.draft_arrays(int(tokens[-1]))
        totals = np.searchsorted(tokens, padded[tokens], side="right") - 1
        sure = n + float(np.nan_to_num(g[:, :least], nan=0.0).sum())
        prices = draft_ms[tokens[totals]]
        rates = _rates(sure, ranked, prices, n, N + n * least, costs, price_other)
        best = int(rates.argmax())
        return n * least + int(totals[best]), float(rates[best])

    def _trimmed(
        self,
        drafted: np.ndarray,  # [R, K], 0 past each limit
        limits: np.ndarray,
        n: int,
        N: int,
        costs: CostTables,
        drafter_tokens: int,
        price_other: bool,
    ) -> tuple[int, float]:
        """(B, rate) once ``drafter_tokens`` are spent, under both floors."""
        least = np.minimum(limits, self.min_draft)
        held = np.arange(drafted.shape[1]) < least[:, None]
        sure = n + float(np.nan_to_num(drafted[held], nan=0.0).sum())
        ranked = pool(drafted[:, self.min_draft :])[0]
        kept, extra = int(least.sum()), int((limits - least).sum())
        ranked = np.concatenate([ranked, np.zeros(extra - len(ranked))])
        price = np.array(costs.draft_ms(drafter_tokens))
        rates = _rates(sure, ranked, price, n, N + kept, costs, price_other)
        best = int(rates.argmax())
        if rates[best] < (1 + self.min_gain) * rates[-1]:
            best = extra
        return kept + best, float(rates[best])


def _rates(
    sure: float,  # tokens expected without any of ``ranked``
    ranked: np.ndarray,  # [P] scores, descending
    draft_ms: np.ndarray,  # [P + 1] or one price
    n: int,
    N: int,
    costs: CostTables,
    price_other: bool,
) -> np.ndarray:
    """[P + 1] Eq. (4) with the first 0..P of ``ranked`` verified on top of N tokens."""
    gain = sure + np.concatenate([[0.0], np.cumsum(ranked)])
    verify = verify_prices(costs, N + np.arange(len(gain)), n)
    return gain / (draft_ms + verify + (costs.other_ms(n) if price_other else 0.0))


def verify_prices(
    costs: CostTables,
    tokens: np.ndarray,  # [T]
    batch: int,
) -> np.ndarray:
    """``costs.verify_ms`` of many token counts at once, [T] milliseconds."""
    xs, ys = costs.verify_knots(batch)
    buckets = costs.verify_buckets
    if len(buckets) > 0:
        at = np.searchsorted(buckets, tokens)
        bucket = buckets[np.minimum(at, len(buckets) - 1)]
        tokens = np.where(at < len(buckets), bucket, tokens)
    rise = np.diff(ys) / np.diff(xs)
    mean = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
    past = np.maximum(tokens - xs[-1], 0) * max(mean, rise[-1])
    return np.interp(tokens, xs, ys) + past
