"""Selector walk over packed drafts with the post-draft confidence, one launch.

Kernel twin of ``selector.walk`` and of the sum around it in ``estimate.Estimators.walk``. One
program walks one draft: position after position it forms the selector's state from the token
just chosen, scores the candidates, chooses, and adds the state's share of the confidence
logit. Drafts have their own lengths, read from the device; a draft of length 0 does nothing.

Noise is drawn on the way from (seed, position, token), in the stream of vLLM's own drafting
kernels and of ``selector.draft_noise`` on a CPU: a seeded request drafts the same again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from forespark.serving.selector import WalkInputs, WalkOutputs

# Both as in vLLM's sampling: the smallest positive draw of tl.rand, and what a drafter adds
# to the position so that it shares no noise with the target.
_SMALLEST_DRAW = tl.constexpr(4.6566127342e-10)
_DRAFT_SALT = tl.constexpr(1 << 30)


@triton.jit
def _gumbel(seed, position, tokens):
    """Standard Gumbel noise of each token, -log(-log1p(-u))."""
    key = tl.randint(seed, position + _DRAFT_SALT)
    draw = tl.maximum(tl.rand(key, tokens), _SMALLEST_DRAW)
    # log1p(-u) from log(1 - u), corrected for the rounding of 1 - u (W. Kahan): the winning
    # tail is at u near 0, where log(1 - u) alone has no digits.
    rest = 1.0 - draw
    exact = rest == 1.0
    log1p = tl.where(exact, -draw, tl.log(rest) * draw / tl.where(exact, 1.0, 1.0 - rest))
    return -tl.log(-log1p)


@triton.jit
def _walk_kernel(
    ids_ptr,  # [M, C]
    unary_ptr,  # [M, C]
    hidden_ptr,  # [M, RANK]
    linear_ptr,  # [M] w_h . h
    first_ptr,  # [R]
    lengths_ptr,  # [R]
    anchor_ptr,  # [R]
    predecessor_ptr,  # [V, RANK]
    successor_ptr,  # [V, RANK]
    weight_ptr,  # [RANK]
    bias_ptr,  # [1]
    temperature_ptr,  # [R]
    seeds_ptr,  # [R]
    position_ptr,  # [R] of the token before the anchor
    tokens_ptr,  # [M] out
    scores_ptr,  # [M, C] out
    confidence_ptr,  # [M] out
    logits_ptr,  # [M] out
    rows,
    C: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,  # powers of two that hold C and RANK
    DEPTH: tl.constexpr,
    DRAW: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(first_ptr + request).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + request).to(tl.int64), rows - first)
    previous = tl.load(anchor_ptr + request).to(tl.int64)
    c = tl.arange(0, WIDTH)
    k = tl.arange(0, DEPTH)
    real = c < C
    deep = k < RANK
    weight = tl.load(weight_ptr + k, mask=deep, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr).to(tl.float32)
    for step in range(length):
        row = first + step
        hidden = tl.load(hidden_ptr + row * RANK + k, mask=deep, other=0.0).to(tl.float32)
        before = tl.load(predecessor_ptr + previous * RANK + k, mask=deep, other=0.0)
        state = hidden * before.to(tl.float32)
        confidence = tl.sum(state * weight, axis=0)
        ids = tl.load(ids_ptr + row * C + c, mask=real, other=0).to(tl.int64)
        after = tl.load(
            successor_ptr + ids[:, None] * RANK + k[None, :],
            mask=real[:, None] & deep[None, :],
            other=0.0,
        )
        edge = tl.sum(state[None, :] * after.to(tl.float32), axis=1)
        scores = tl.load(unary_ptr + row * C + c, mask=real, other=0.0).to(tl.float32) + edge
        drawn = scores
        if DRAW:
            temperature = tl.load(temperature_ptr + request).to(tl.float32)
            position = tl.load(position_ptr + request).to(tl.int64) + 1 + step
            noise = _gumbel(tl.load(seeds_ptr + request), position, ids)
            hot = temperature > 0.0
            drawn = tl.where(hot, scores / tl.where(hot, temperature, 1.0) + noise, scores)
        # A NaN is never chosen while a number is there; nor is padding, which loses ties.
        drawn = tl.where(real & (drawn == drawn), drawn, float("-inf"))
        best = tl.argmax(drawn, axis=0)
        previous = tl.sum(tl.where(c == best, ids, 0), axis=0)
        tl.store(tokens_ptr + row, previous)
        tl.store(scores_ptr + row * C + c, scores, mask=real)
        tl.store(confidence_ptr + row, confidence)
        tl.store(logits_ptr + row, tl.load(linear_ptr + row).to(tl.float32) + confidence + bias)


def walk_kernel(
    inputs: WalkInputs,
    linear: torch.Tensor,  # [M] hidden part of the confidence logit, w_h . h
    bias: torch.Tensor,  # [1]
    seeds: torch.Tensor | None,  # [R] int64; None drafts greedily whatever the temperature
    position: torch.Tensor,  # [R] position of the token before the anchor
) -> tuple[WalkOutputs, torch.Tensor]:
    """Kernel twin of ``selector.walk``: its outputs and the post-draft logits [M].

    ``inputs.noise`` is not read. Rows that belong to no draft (padding) hold 0.
    """
    from forespark.serving.selector import WalkOutputs

    rows, width = inputs.candidate_ids.shape
    rank, device = inputs.hidden.shape[1], inputs.hidden.device
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    scores = torch.zeros(rows, width, dtype=torch.float32, device=device)
    confidence = torch.zeros(rows, dtype=torch.float32, device=device)
    logits = torch.zeros(rows, dtype=torch.float32, device=device)
    requests = inputs.lengths.shape[0]
    assert inputs.predecessor.is_contiguous() and inputs.successor.is_contiguous()
    if rows and requests:
        wide, deep = triton.next_power_of_2(width), triton.next_power_of_2(rank)
        _walk_kernel[(requests,)](
            inputs.candidate_ids.contiguous(), inputs.unary.contiguous(),
            inputs.hidden.contiguous(), linear, inputs.first, inputs.lengths, inputs.anchor,
            inputs.predecessor, inputs.successor, inputs.weight, bias, inputs.temperature,
            inputs.lengths if seeds is None else seeds, position,
            tokens, scores, confidence, logits, rows,
            C=width, RANK=rank, WIDTH=wide, DEPTH=deep, DRAW=seeds is not None,
            num_warps=max(1, min(8, wide * deep // 512)),
        )  # fmt: skip
    return WalkOutputs(tokens, scores, confidence), logits
