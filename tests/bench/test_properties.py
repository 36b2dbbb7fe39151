"""Random schedules keep every property; a schedule that breaks one is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from forespark.bench import properties
from forespark.fore_d.schedule import Plan


def test_no_random_schedule_breaks_a_property():
    """3,000 of the 100,000 that ``eval.py --bench scheduler`` draws."""
    found = properties.check_schedules(3000, seed=1)
    assert found["first"] is None, found
    assert found["drafting"] > 1000, "hardly any schedule drafts: the draws show nothing"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"drafter_tokens": 1}, "total"),
        ({"draft_total": 99}, "total"),
        ({"draft_total": 9, "verify_total": 0}, "score"),
        ({"draft_total": 1, "drafter_tokens": 2}, "budget"),
    ],
)
def test_a_broken_plan_is_noticed(monkeypatch, change, name):
    g = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, np.nan], [0.2, -0.1, 0.3]], dtype=np.float32)
    whole = {"draft_total": 5, "verify_total": 5, "objective": 1.0, "drafter_tokens": 7}
    monkeypatch.setattr(properties, "plan", lambda *args: Plan(**{**whole, **change}))
    prices = properties.random_prices(np.random.default_rng(0))
    assert name in properties.broken(g, 3, prices)
    monkeypatch.setattr(properties, "plan", lambda *args: Plan(**whole))
    assert properties.broken(g, 3, prices) == []


def test_a_split_that_skips_a_better_position_is_noticed(monkeypatch):
    import torch

    g = np.array([[0.9, 0.8], [0.1, 0.1]], dtype=np.float32)
    monkeypatch.setattr(properties, "plan", lambda *args: Plan(2, 1, 1.0, 4))
    monkeypatch.setattr(properties, "split", lambda g, total: torch.tensor([1, 1]))
    prices = properties.random_prices(np.random.default_rng(0))
    assert properties.broken(g, 2, prices) == ["top"]
