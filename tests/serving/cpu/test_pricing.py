"""Prices handed to vLLM's adaptive verification."""

import numpy as np

from forespark.serving.cpu.pricing import dense_curve, profile_sizes


def test_sizes_reach_the_limits_and_no_further():
    assert profile_sizes(64, 8) == [1, 2, 4, 8, 16, 32, 64]
    assert profile_sizes(48, 6) == [1, 2, 4, 6, 8, 16, 32, 48]
    assert profile_sizes(1, 4) == [1]


def test_curve_is_the_median_and_linear_in_between():
    curve = dense_curve([(1, 2.0), (1, 9.0), (1, 2.2), (5, 10.2), (3, 6.2)])
    assert [size for size, _ in curve] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose([price for _, price in curve], [2.2, 4.2, 6.2, 8.2, 10.2])


def test_vllm_prices_every_token_with_it():
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves

    draft, verify = build_cost_tables_from_curves(
        dense_curve([(1, 1.0), (4, 4.0)]), dense_curve([(1, 5.0), (9, 13.0)]), 6, 20
    )
    np.testing.assert_allclose(draft[1:], [1, 2, 3, 4, 5, 6])
    np.testing.assert_allclose(verify[1:], np.arange(1, 21) + 4.0)
