"""CPU twins of the kernels that change logits on request: penalties, masks, bias, min-p.

They run only in steps where a request asks for the feature. T = rows of logits, V =
vocabulary, R = request slots; logits are float32 and changed in place.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import torch

from forespark.serving.cpu.registry import twin

_SAMPLE = "vllm.v1.worker.gpu.sample"
_WORD = 32  # bits per word of a packed mask


@nb.njit(cache=True)
def _penalize(
    num_rows, logits, index, tokens, local_pos, repetition, frequency, presence, prompt, counts
):
    vocabulary = logits.shape[1]
    seen = np.empty(vocabulary, np.int32)
    for row in range(num_rows):
        slot = index[row]
        rep, freq, pres = repetition[slot], frequency[slot], presence[slot]
        if rep == 1.0 and freq == 0.0 and pres == 0.0:
            continue
        seen[:] = counts[slot, :vocabulary]
        first = row - local_pos[row]
        for i in range(local_pos[row]):  # drafts before this position count as output
            seen[tokens[first + i + 1]] += 1
        for token in range(vocabulary):
            value = logits[row, token]
            in_output = seen[token] > 0
            in_prompt = (prompt[slot, token // _WORD] >> np.uint32(token % _WORD)) & 1
            if rep != 1.0 and (in_output or in_prompt):
                value *= np.float32(1.0) / rep if value > 0 else rep
            value -= freq * np.float32(seen[token])
            if in_output:
                value -= pres
            logits[row, token] = value


@twin(f"{_SAMPLE}.penalties", "_penalties_kernel")
def penalties(
    grid: tuple[int, ...],
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [T]
    token_ids: torch.Tensor,  # [T] input token of each row
    expanded_local_pos: torch.Tensor,  # [T] place of the row within its request
    repetition_penalty: torch.Tensor,  # [R]
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,  # [R, words] packed
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [R, V]
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Repetition, frequency and presence penalties, drafts of the same step included."""
    _penalize(
        grid[0],
        logits[:, :vocab_size].numpy(),
        expanded_idx_mapping.numpy(),
        token_ids.numpy(),
        expanded_local_pos.numpy(),
        repetition_penalty.numpy(),
        frequency_penalty.numpy(),
        presence_penalty.numpy(),
        prompt_bin_mask.numpy().view(np.uint32),
        output_bin_counts.numpy(),
    )


@nb.njit(cache=True)
def _count_tokens(num_rows, index, ids, prompt_lens, prefill_lens, mask, counts):
    for row in range(num_rows):
        slot = index[row]
        for i in range(prompt_lens[slot]):
            token = ids[slot, i]
            mask[slot, token // _WORD] |= np.uint32(1) << np.uint32(token % _WORD)
        for i in range(prompt_lens[slot], prefill_lens[slot]):
            counts[slot, ids[slot, i]] += 1


@twin(f"{_SAMPLE}.penalties", "_bincount_kernel")
def bincount(
    grid: tuple[int, ...],
    expanded_idx_mapping: torch.Tensor,  # [new requests]
    all_token_ids: torch.Tensor,  # [R, L]
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,  # [R, words], written
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [R, V], written
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Which tokens a new request's prompt holds, and counts of those it already produced."""
    _count_tokens(
        grid[0],
        expanded_idx_mapping.numpy(),
        all_token_ids.numpy(),
        prompt_len.numpy(),
        prefill_len.numpy(),
        prompt_bin_mask.numpy().view(np.uint32),
        output_bin_counts.numpy(),
    )


@twin(f"{_SAMPLE}.min_p", "_min_p_kernel")
def min_p(
    grid: tuple[int, ...],
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    min_p: torch.Tensor,  # [R]
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Drop tokens less likely than min_p times the likeliest; 0 drops none."""
    rows = logits[: grid[0], :vocab_size]
    share = min_p[expanded_idx_mapping.long()].float()
    threshold = rows.amax(dim=1) + share.log()
    rows.masked_fill_(rows < threshold.unsqueeze(1), float("-inf"))


@nb.njit(cache=True)
def _matches(words, begin, prefix, output, prompt_len, output_len, length, inputs, first):
    """Whether the newest tokens, committed then drafted, are the first ones of a bad word."""
    for i in range(prefix):
        place = length - prefix + i
        if place >= output_len:
            actual = inputs[first + place - output_len + 1]
        else:
            actual = output[prompt_len + place]
        if words[begin + i] != actual:
            return False
    return True


@nb.njit(cache=True)
def _ban_words(
    num_rows, logits, index, words, offsets, num_words, ids, prompt, total, inputs, local_pos
):
    for row in range(num_rows):
        slot = index[row]
        output_len = total[slot] - prompt[slot]
        length = output_len + local_pos[row]
        for word in range(num_words[slot]):
            begin, end = offsets[slot, word], offsets[slot, word + 1]
            prefix = end - begin - 1
            if prefix > length:
                continue
            if _matches(
                words[slot],
                begin,
                prefix,
                ids[slot],
                prompt[slot],
                output_len,
                length,
                inputs,
                row - local_pos[row],
            ):
                logits[row, words[slot, end - 1]] = -np.inf


@twin(f"{_SAMPLE}.bad_words", "_bad_words_kernel")
def bad_words(
    grid: tuple[int, ...],
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    bad_word_token_ids: torch.Tensor,  # [R, tokens] words end to end
    bad_word_token_ids_stride: int,
    bad_word_offsets: torch.Tensor,  # [R, words + 1]
    bad_word_offsets_stride: int,
    num_bad_words: torch.Tensor,  # [R]
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,  # [T]
    expanded_local_pos: torch.Tensor,  # [T]
) -> None:
    """Forbid the token that would complete a bad word."""
    _ban_words(
        grid[0],
        logits.numpy(),
        expanded_idx_mapping.numpy(),
        bad_word_token_ids.numpy(),
        bad_word_offsets.numpy(),
        num_bad_words.numpy(),
        all_token_ids.numpy(),
        prompt_len.numpy(),
        total_len.numpy(),
        input_ids.numpy(),
        expanded_local_pos.numpy(),
    )


@nb.njit(cache=True)
def _mask_stops(row, stops, restore):
    """Forbid stop tokens, unless a grammar leaves nothing else to say."""
    saved = row[stops].copy()
    for token in stops:
        row[token] = -np.inf
    if restore and row.max() == -np.inf:
        for i in range(len(stops)):
            if np.isfinite(saved[i]):
                row[stops[i]] = saved[i]


@nb.njit(cache=True)
def _bias_rows(
    num_rows,
    logits,
    index,
    num_allowed,
    allowed,
    num_bias,
    bias_tokens,
    bias,
    positions,
    min_lens,
    num_stops,
    restore,
    stops,
    check_rows,
):
    for row in range(num_rows):
        slot = index[row]
        values = logits[row]
        count = num_allowed[slot]
        if count > 0:
            kept = allowed[slot, :count]
            saved = values[kept].copy()
            values[:] = -np.inf
            for i in range(count):
                values[kept[i]] = saved[i]
        for i in range(num_bias[slot]):
            values[bias_tokens[slot, i]] += bias[slot, i]
        if num_stops[slot] > 0 and positions[row] + 1 < min_lens[slot]:
            _mask_stops(values, stops[slot, : num_stops[slot]], check_rows and restore[slot] != 0)


@twin(f"{_SAMPLE}.logit_bias", "_bias_kernel")
def logit_bias(
    grid: tuple[int, ...],
    logits: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping: torch.Tensor,
    num_allowed_token_ids: torch.Tensor,  # [R]
    allowed_token_ids: torch.Tensor,  # [R, A]
    allowed_token_ids_stride: int,
    num_logit_bias: torch.Tensor,  # [R]
    bias_token_ids: torch.Tensor,  # [R, A]
    bias_token_ids_stride: int,
    bias: torch.Tensor,  # [R, A]
    bias_stride: int,
    pos: torch.Tensor,  # [T]
    min_lens: torch.Tensor,  # [R]
    num_stop_token_ids: torch.Tensor,  # [R]
    restore_when_all_masked: torch.Tensor,  # [R]
    stop_token_ids: torch.Tensor,  # [R, S]
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Allowed tokens, then logit bias, then stop tokens before the minimum length."""
    _bias_rows(
        grid[0],
        logits[:, :vocab_size].numpy(),
        expanded_idx_mapping.numpy(),
        num_allowed_token_ids.numpy(),
        allowed_token_ids.numpy(),
        num_logit_bias.numpy(),
        bias_token_ids.numpy(),
        bias.numpy(),
        pos.numpy(),
        min_lens.numpy(),
        num_stop_token_ids.numpy(),
        restore_when_all_masked.numpy(),
        stop_token_ids.numpy(),
        CHECK_ALL_MASKED_ROWS,
    )


@twin("vllm.v1.worker.gpu.structured_outputs", "_apply_grammar_bitmask_kernel")
def apply_grammar_bitmask(
    grid: tuple[int, ...],  # (masks, blocks)
    logits: torch.Tensor,
    logits_stride: int,
    logits_indices: torch.Tensor,  # [masks] request * MASK_STRIDE + position
    cu_num_logits: torch.Tensor,  # [B + 1]
    bitmask: torch.Tensor,  # [masks, words] packed, 1 = allowed
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Forbid what the grammar forbids; positions trimmed from the batch are skipped."""
    mapping = logits_indices[: grid[0]].long()
    request, position = mapping // MASK_STRIDE, mapping % MASK_STRIDE
    starts = cu_num_logits.long()
    active = position < starts[request + 1] - starts[request]
    rows = (starts[request] + position)[active]
    words = bitmask[: grid[0]][active]
    bits = torch.arange(_WORD, dtype=torch.int32)
    allowed = ((words.unsqueeze(-1) >> bits) & 1).flatten(1)[:, :vocab_size].bool()
    logits[rows, :vocab_size] = logits[rows, :vocab_size].masked_fill(~allowed, float("-inf"))
