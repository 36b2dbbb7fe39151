"""Price tables: lookups, refusals, loud repairs, keys."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from fore_d_cases import tables

from forespark.fore_d.costs import CostTables, check_key

GOOD = {
    "draft_tokens": [1, 2, 4],
    "draft_points_ms": [1.0, 2.0, 4.0],
    "verify_batches": [1, 4],
    "verify_per_request": [0, 2],
    "verify_points_ms": [[10.0, 12.0], [13.0, 21.0]],
    "other_batches": [1, 4],
    "other_points_ms": [1.0, 1.0],
}


def make(**changes):
    return CostTables(**{**GOOD, **changes})


def test_draft_price_on_cpu_and_on_graphs():
    cpu = make()
    assert [cpu.draft_ms(t) for t in (0, 1, 3, 4, 6)] == [0.0, 1.0, 3.0, 4.0, 6.0]
    step = make(draft_stepwise=True)
    assert [step.draft_ms(t) for t in (0, 1, 2, 3, 4, 6)] == [0.0, 1.0, 2.0, 4.0, 4.0, 6.0]


def test_verify_price_is_exact_on_the_grid_and_linear_between():
    c = make()
    assert c.verify_ms(1, 1) == 10
    assert c.verify_ms(12, 4) == 21
    assert c.verify_ms(8, 4) == 17  # one draft each
    assert c.verify_ms(5, 2) == pytest.approx(10 + 2 * 0.75 + (13 - 10) / 3 + 0.5, abs=1.0)
    assert c.verify_ms(20, 4) == 29  # past the end: 1 ms a token
    assert c.verify_ms(0, 0) == 10  # nothing cheaper than the smallest step


def test_verify_price_on_graphs_is_that_of_the_graph():
    c = make(verify_buckets=[4, 8, 12])
    assert c.verify_ms(5, 4) == c.verify_ms(8, 4) == 17
    assert c.verify_ms(14, 4) == 23  # beyond the largest graph every token counts


def test_flat_last_points_do_not_make_bigger_steps_free():
    c = make(draft_points_ms=[1.0, 4.0, 4.0])
    assert c.draft_ms(8) == pytest.approx(4 + 4 * 1.0)  # the table's mean slope


def test_table_grows_past_the_profile():
    c = make()
    assert c.draft_ms(1000) == pytest.approx(1000.0)
    assert c.draft_ms(3) == 3.0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"draft_tokens": [], "draft_points_ms": []}, "draft tokens"),
        ({"draft_tokens": [4], "draft_points_ms": [1.0]}, "at least 2"),
        ({"verify_batches": [1], "verify_points_ms": [[1.0, 2.0]]}, "verify batch"),
        ({"verify_per_request": [0], "verify_points_ms": [[1.0], [2.0]]}, "per_request"),
        ({"draft_points_ms": [1.0, float("nan"), 2.0]}, "NaN"),
        ({"draft_points_ms": [1.0, -2.0, 3.0]}, "negative"),
        ({"other_points_ms": [1.0, float("inf")]}, "other ms"),
        ({"draft_tokens": [1, 1, 2]}, "increasing"),
        ({"draft_tokens": [0, 1, 2]}, ">= 1"),
        ({"verify_points_ms": [[1.0, 2.0]]}, "damaged"),
        ({"verify_points_ms": [[0.0, 1.0], [1.0, 2.0]]}, "0 ms"),
    ],
)
def test_bad_tables_are_refused(change, word):
    with pytest.raises(ValueError, match=word):
        make(**change)


def test_non_monotone_tables_are_raised_loudly():
    with pytest.warns(UserWarning, match=r"draft ms: 1 of 3 prices fall .* 1\.5 ms"):
        c = make(draft_points_ms=[1.0, 3.0, 1.5])
    assert c.draft_points_ms.tolist() == [1.0, 3.0, 3.0]
    with pytest.warns(UserWarning, match="verify ms"):
        c = make(verify_points_ms=[[10.0, 12.0], [9.0, 21.0]])
    assert c.verify_points_ms.tolist() == [[10.0, 12.0], [10.0, 21.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()


def test_prices_never_fall():
    for stepwise in (False, True):
        c = tables(stepwise=stepwise)
        draft = [c.draft_ms(t) for t in range(300)]
        assert (np.diff(draft) >= 0).all()
        for batch in (1, 3, 17, 80):
            verify = [c.verify_ms(batch + b, batch) for b in range(300)]
            assert (np.diff(verify) >= -1e-9).all()


def test_key_mismatch_names_the_field_and_the_command():
    key = {"target": "smollm2", "tensor_parallel_size": 1, "max_num_seqs": 64}
    check_key(key, key)
    with pytest.raises(ValueError, match=r"max_num_seqs is 64 there but 32 here") as error:
        check_key(key, {**key, "max_num_seqs": 32})
    assert "`python curves.py --target smollm2`" in str(error.value)
    with pytest.raises(ValueError, match="dtype is None"):
        check_key(key, {**key, "dtype": "float32"})
