"""Grouped convolution kernel against its plain form: in the interpreter, or on a GPU."""

import pytest
import torch

from forespark.serving.conv import grouped_conv
from forespark.serving.kernels.conv import grouped_conv_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(rows, groups=3, size=4, taps=2, dtype=torch.float32, seed=0):
    """Inputs as the drafter gives them: delta is one side of a wider projection."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, groups * size, generator=rng).to(dtype)
    delta = torch.randn(rows, 2, taps, groups, generator=rng).to(dtype)[:, 1]
    base = torch.randn(taps, groups * size, generator=rng).to(dtype)
    return hidden, delta, base


def offsets(lengths, padding=0):
    """Places in blocks of d + 1 tokens; padding rows are blocks of their own."""
    places = [o for d in lengths if d for o in range(d + 1)]
    return torch.tensor(places + [0] * padding, dtype=torch.int64)


def run(hidden, delta, base, offset):
    parts = (part.to(DEVICE) for part in (hidden, delta, base, offset))
    return grouped_conv_kernel(*parts).cpu()


@pytest.mark.parametrize("lengths", [[1], [7], [0, 3, 0, 1, 5], [1, 1, 1]])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_ragged_blocks_equal_the_plain_form(lengths, taps):
    offset = offsets(lengths, padding=2)
    inputs = make(len(offset), taps=taps)
    # A handful of float32 products; a row of the wrong block errs by about 1.
    torch.testing.assert_close(
        run(*inputs, offset), grouped_conv(*inputs, offset), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("size", [5, 341, 342])  # columns: 15, 1023 and 1026, past one program
def test_any_number_of_columns(size):
    offset = offsets([2])
    inputs = make(3, size=size)
    torch.testing.assert_close(
        run(*inputs, offset), grouped_conv(*inputs, offset), atol=1e-6, rtol=1e-5
    )


def test_half_precision_rounds_once():
    offset = offsets([3, 2])
    inputs = make(7, dtype=torch.bfloat16)
    exact = grouped_conv(*(part.float() for part in inputs), offset)
    out = run(*inputs, offset)
    assert out.dtype == torch.bfloat16
    # One bfloat16 step, for the interpreter cuts where a GPU rounds; the plain form rounds
    # each product as well.
    torch.testing.assert_close(out.float(), exact, atol=2e-3, rtol=2**-7)
    torch.testing.assert_close(out, grouped_conv(*inputs, offset), atol=0.1, rtol=2**-6)


def test_nothing_crosses_a_block_or_comes_out_of_padding():
    offset = offsets([1, 2], padding=2)
    hidden, delta, base = make(len(offset))
    want = run(hidden, delta, base, offset)
    hidden[1], hidden[5:], delta[5:] = torch.nan, torch.inf, torch.nan
    out = run(hidden, delta, base, offset)
    assert torch.equal(out[2:5], want[2:5])
    assert torch.equal(out[0], want[0]), "a row read the one after it"


def test_no_rows():
    hidden, delta, base = make(0)
    assert run(hidden, delta, base, offsets([])).shape == hidden.shape
