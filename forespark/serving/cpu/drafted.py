"""Log-probabilities of the drafted tokens, from per-block parts of the log-sum-exps."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from forespark.serving.cpu.vocab import as_numpy32, log_sum_exp


def drafted_log_probs(
    num_rows: int,
    target_logits: torch.Tensor,  # [L, V]
    target_parts: tuple[np.ndarray, np.ndarray],  # maxima and sums, [L, b] each
    draft_logits: torch.Tensor | None,  # [S, K, V] before temperature
    draft_parts: tuple[np.ndarray, np.ndarray],
    draft_sampled: np.ndarray,  # [L]
    cu_num_logits: np.ndarray,  # [R + 1]
    slots: np.ndarray,  # [R]
    temperatures: np.ndarray,  # [S]
) -> np.ndarray:
    """Log-probability of each row's draft token under target and drafter, and both log-sums.

    Returns:
        [L, 4] float32: log p, log q, log-sum-exp of target, of drafter. A drafter without
        logits is certain: log q = 0. Rows of greedy requests and bonus rows hold garbage
        that nothing reads.
    """
    out = np.zeros((num_rows, 4), np.float32)
    counts = np.diff(cu_num_logits)
    rows = np.arange(num_rows)
    row_slots = np.repeat(slots, counts)
    row_steps = rows - np.repeat(cu_num_logits[:-1], counts)
    bonus = np.zeros(num_rows, bool)
    bonus[cu_num_logits[1:] - 1] = True
    judged = np.flatnonzero(~bonus & (temperatures[row_slots] != 0.0))
    if not len(judged):
        return out
    tokens = np.maximum(draft_sampled[judged + 1], 0)  # -1: placeholder, never accepted
    picked = target_logits[torch.from_numpy(judged), torch.from_numpy(tokens)]
    out[judged, 0] = as_numpy32(picked)
    _subtract_lse(judged, *target_parts, out[:, 0], out[:, 2])
    if draft_logits is not None:
        states = row_slots[judged]
        index = (states, row_steps[judged], tokens)
        picked = draft_logits[tuple(torch.from_numpy(i.astype(np.int64)) for i in index)]
        out[judged, 1] = as_numpy32(picked) / temperatures[states]
        _subtract_lse(judged, *draft_parts, out[:, 1], out[:, 3])
    return out


@njit(cache=True)
def _subtract_lse(rows, maxima, sums, log_probs, lse):
    for row in rows:
        lse[row] = log_sum_exp(maxima[row], sums[row])
        log_probs[row] -= lse[row]
