"""Selector walk and selector-conditioned confidence over packed drafts.

DFlash 2 keeps a few candidate tokens per position and picks one by conditioning on the
token chosen just before it. The post-draft estimator reads the very features of that
choice: ``l = w . [h; s] + b`` with ``s = (W_s h) * E_pred(previous token)``, where ``W_s``
and ``E_pred`` are the selector's hidden projection and predecessor codebook (paper,
Eq. (5)). Both are one walk along each draft.

``walk`` is the readable form and runs on any device; ``walk_numba`` is its twin for the
CPU path, ``kernels/walk.py`` the one for a GPU. All three choose the first of equal
candidates, and a NaN only where there is nothing else.

Shapes: M = draft positions of the batch, R = requests, C = candidates, r = selector rank;
rows of one request lie back to back in step order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch

from forespark.serving.cpu.philox import gumbel32, gumbel_key


@dataclass
class WalkInputs:
    """Everything the walk reads.

    Attributes:
        candidate_ids: [M, C] int64 candidate tokens.
        unary: [M, C] float32 backbone logits of the candidates.
        hidden: [M, r] selector projection ``W_s h``.
        first: [R] int64 first row of each request.
        lengths: [R] int64 draft length of each request (0: none).
        anchor: [R] int64 anchor token.
        predecessor: [V, r] codebook E_pred.
        successor: [V, r] codebook.
        weight: [r] the confidence weights of s.
        temperature: [R] float32; 0 is greedy.
        noise: [M, C] Gumbel noise, or None when every request is greedy.
    """

    candidate_ids: torch.Tensor
    unary: torch.Tensor
    hidden: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    anchor: torch.Tensor
    predecessor: torch.Tensor
    successor: torch.Tensor
    weight: torch.Tensor
    temperature: torch.Tensor
    noise: torch.Tensor | None = None


@dataclass
class WalkOutputs:
    """Attributes:
    tokens: [M] int64 chosen tokens.
    scores: [M, C] float32 selector logits that each choice was drawn from.
    confidence: [M] float32 ``w_s . s`` of each position (the part that needs the choice).
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    confidence: torch.Tensor


def walk(inputs: WalkInputs, max_length: int) -> WalkOutputs:
    """Walk every draft one position at a time, all requests side by side.

    Args:
        inputs: see ``WalkInputs``.
        max_length: the longest draft (host bound of ``lengths``).
    """
    rows, width = inputs.candidate_ids.shape
    device = inputs.candidate_ids.device
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    scores = torch.zeros(rows, width, dtype=torch.float32, device=device)
    confidence = torch.zeros(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return WalkOutputs(tokens, scores, confidence)
    previous = inputs.anchor.clone()
    for step in range(max_length):
        live = step < inputs.lengths
        row = torch.where(live, inputs.first + step, 0)
        state = inputs.hidden[row].float() * inputs.predecessor[previous].float()  # s, [R, r]
        ids = inputs.candidate_ids[row]
        logits = inputs.unary[row] + (state[:, None] * inputs.successor[ids].float()).sum(-1)
        drawn = logits
        if inputs.noise is not None:
            hot = (inputs.temperature > 0)[:, None]
            scaled = logits / torch.where(hot, inputs.temperature[:, None], 1.0)
            drawn = torch.where(hot, scaled + inputs.noise[row], logits)
        drawn = drawn.masked_fill(drawn.isnan(), -torch.inf)
        chosen = ids.gather(1, drawn.argmax(1, keepdim=True)).squeeze(1)
        at = row[live]
        tokens[at] = chosen[live]
        scores[at] = logits[live]
        confidence[at] = (state @ inputs.weight.float())[live]
        previous = torch.where(live, chosen, previous)
    return WalkOutputs(tokens, scores, confidence)


def walk_numba(inputs: WalkInputs) -> WalkOutputs:
    """CPU twin of ``walk``: one compiled loop over drafts."""
    rows, width = inputs.candidate_ids.shape
    tokens = torch.zeros(rows, dtype=torch.int64)
    scores = torch.zeros(rows, width, dtype=torch.float32)
    confidence = torch.zeros(rows, dtype=torch.float32)
    noise = inputs.noise
    _walk_loop(
        inputs.candidate_ids.numpy(),
        inputs.unary.numpy(),
        inputs.hidden.numpy(),
        inputs.first.numpy(),
        inputs.lengths.numpy(),
        inputs.anchor.numpy(),
        inputs.predecessor.numpy(),
        inputs.successor.numpy(),
        inputs.weight.numpy(),
        inputs.temperature.numpy(),
        np.zeros((0, width), np.float32) if noise is None else noise.numpy(),
        tokens.numpy(),
        scores.numpy(),
        confidence.numpy(),
    )
    return WalkOutputs(tokens, scores, confidence)


@numba.njit(cache=True, fastmath={"contract", "reassoc"})
def _walk_loop(
    candidate_ids,
    unary,
    hidden,
    first,
    lengths,
    anchor,
    predecessor,
    successor,
    weight,
    temperature,
    noise,
    tokens,
    scores,
    confidence,
):
    rank = hidden.shape[1]
    width = candidate_ids.shape[1]
    state = np.empty(rank, np.float32)
    for request in range(lengths.shape[0]):
        previous = anchor[request]
        for step in range(lengths[request]):
            row = first[request] + step
            total = np.float32(0.0)
            for k in range(rank):
                state[k] = hidden[row, k] * predecessor[previous, k]
                total += state[k] * weight[k]
            confidence[row] = total
            best = 0
            best_value = -np.inf
            for c in range(width):
                successor_row = successor[candidate_ids[row, c]]
                edge = np.float32(0.0)
                for k in range(rank):
                    edge += state[k] * successor_row[k]
                value = unary[row, c] + edge
                scores[row, c] = value
                if noise.shape[0] > 0 and temperature[request] > 0:
                    value = value / temperature[request] + noise[row, c]
                if value > best_value:
                    best_value = value
                    best = c
            previous = candidate_ids[row, best]
            tokens[row] = previous


def draft_noise(
    seeds: torch.Tensor,  # [M] request seeds
    positions: torch.Tensor,  # [M] position before each drafted token
    candidate_ids: torch.Tensor,  # [M, C]
) -> torch.Tensor:
    """[M, C] float32 Gumbel noise of the drafter's draws, on a CPU.

    It is the stream vLLM's kernels use, so a seeded request drafts the same tokens again.
    """
    out = torch.empty(candidate_ids.shape, dtype=torch.float32)
    _noise_loop(seeds.numpy(), positions.numpy(), candidate_ids.numpy(), out.numpy())
    return out


@numba.njit(cache=True)
def _noise_loop(seeds, positions, candidate_ids, out):
    for row in range(candidate_ids.shape[0]):
        key = gumbel_key(seeds[row], positions[row], True)
        for c in range(candidate_ids.shape[1]):
            out[row, c] = gumbel32(key, candidate_ids[row, c])
