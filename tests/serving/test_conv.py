"""Grouped convolution over packed blocks."""

import pytest
import torch

from forespark.serving.conv import BlockOffsets, grouped_conv

GROUPS, SIZE, TAPS = 3, 4, 2


def _inputs(rows: int, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, GROUPS * SIZE, generator=rng)
    delta = torch.randn(rows, TAPS, GROUPS, generator=rng)
    base = torch.randn(TAPS, GROUPS * SIZE, generator=rng)
    return hidden, delta, base


def test_equal_blocks_match_vllm():
    vllm = pytest.importorskip("vllm.model_executor.models.qwen3_dflash2")
    hidden, delta, base = _inputs(16)
    expected = vllm._grouped_conv(hidden, delta, base, 4, GROUPS, SIZE, TAPS)
    torch.testing.assert_close(grouped_conv(hidden, delta, base, torch.arange(16) % 4), expected)


def test_a_block_never_sees_its_neighbour():
    hidden, delta, base = _inputs(6)
    offset = torch.tensor([0, 1, 0, 0, 1, 2])
    alone = torch.cat(
        [
            grouped_conv(hidden[a:b], delta[a:b], base, offset[a:b])
            for a, b in ((0, 2), (2, 3), (3, 6))
        ]
    )
    torch.testing.assert_close(grouped_conv(hidden, delta, base, offset), alone)
    poisoned = hidden.clone()
    poisoned[1] = torch.nan
    out = grouped_conv(poisoned, delta, base, offset)
    assert not out[2:].isnan().any(), "the row after a block's end read that block"


def test_rows_past_the_batch_are_inert():
    offsets = BlockOffsets(8, torch.device("cpu"))
    offsets.set(torch.tensor([0, 1, 2, 3, 4]))
    offsets.set(torch.tensor([0, 1]))
    assert offsets.rows.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
