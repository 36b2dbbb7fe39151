"""CPU twins of the kernels that build a batch and advance the request states.

Names and order of the parameters are the kernels'. B = requests of the batch, R = request
slots, L = longest sequence. ``index`` maps a batch row to its request slot.
"""

from __future__ import annotations

import numba as nb
import torch

from forespark.serving.cpu.registry import twin

_INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"
_PROMPT_LOGPROB = "vllm.v1.worker.gpu.sample.prompt_logprob"


@nb.njit(cache=True)
def _prefill_inputs(
    num_reqs, input_ids, next_tokens, num_lookahead, index, starts, token_ids, lens, computed
):
    for row in range(num_reqs):
        slot = index[row]
        done = computed[slot]
        if done >= lens[slot]:
            continue  # decoding: its input is the last sampled token
        start = starts[row]
        length = starts[row + 1] - start
        for i in range(length):
            input_ids[start + i] = token_ids[slot, done + i]
        for ahead in range(num_lookahead):
            position = done + length + ahead
            token = 0
            if position < lens[slot]:
                token = token_ids[slot, position]
            next_tokens[ahead, slot] = token


@twin(_INPUT_BATCH, "_prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(
    grid: tuple[int, ...],
    input_ids: torch.Tensor,  # [tokens] int32, written
    next_prefill_tokens: torch.Tensor,  # [lookahead, R] int32, written
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: torch.Tensor,  # [B]
    query_start_loc: torch.Tensor,  # [B + 1]
    all_token_ids: torch.Tensor,  # [R, L]
    all_token_ids_stride: int,
    prefill_lens: torch.Tensor,  # [R]
    num_computed_tokens: torch.Tensor,  # [R]
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled prompt tokens, and note the prompt tokens that follow them."""
    _prefill_inputs(
        grid[0],
        input_ids.numpy(),
        next_prefill_tokens.numpy(),
        num_lookahead,
        idx_mapping.numpy(),
        query_start_loc.numpy(),
        all_token_ids.numpy(),
        prefill_lens.numpy(),
        num_computed_tokens.numpy(),
    )


@nb.njit(cache=True)
def _pos_seq_lens(num_reqs, positions, seq_lens, index, starts, computed, max_num_reqs):
    for row in range(num_reqs):
        done = computed[index[row]]
        start = starts[row]
        length = starts[row + 1] - start
        seq_lens[row] = done + length
        for i in range(length):
            positions[start + i] = done + i
    for row in range(num_reqs, max_num_reqs):
        seq_lens[row] = 0


@twin(_INPUT_BATCH, "_prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(
    grid: tuple[int, ...],  # (B + 1,): the kernel's last program pads
    pos: torch.Tensor,  # [tokens] int64, written
    seq_lens: torch.Tensor,  # [R] int32, written, 0 past the batch
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions of the scheduled tokens and sequence lengths after this step."""
    _pos_seq_lens(
        grid[0] - 1,
        pos.numpy(),
        seq_lens.numpy(),
        idx_mapping.numpy(),
        query_start_loc.numpy(),
        num_computed_tokens.numpy(),
        max_num_reqs,
    )


@nb.njit(cache=True)
def _combine(
    num_reqs, input_ids, index, last, starts, seq_lens, lens, drafts, cu_logits, out, num_new
):
    for row in range(num_reqs):
        slot = index[row]
        first = cu_logits[row]
        num_logits = cu_logits[row + 1] - first
        num_drafts = num_logits - num_new
        end = starts[row + 1]
        logits_start = end - num_logits
        for i in range(num_logits):
            out[first + i] = logits_start + i
        if seq_lens[row] <= lens[slot]:
            continue  # still inside the prompt: nothing sampled, nothing drafted
        # A resumed request may need logits inside its prompt: those ids stay.
        if num_new > 0 and seq_lens[row] - num_logits >= lens[slot]:
            input_ids[logits_start] = last[slot]
        for i in range(num_drafts):
            input_ids[end - num_drafts + i] = drafts[slot, i]


@twin(_INPUT_BATCH, "_combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(
    grid: tuple[int, ...],
    input_ids: torch.Tensor,  # [tokens] int32, written
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,  # [R] or [R, 1]
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,  # [R, K]
    draft_tokens_stride: int,
    cu_num_logits: torch.Tensor,  # [B + 1]
    logits_indices: torch.Tensor,  # [logits] int64, written
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Put the last sampled token and the drafts into the batch; rows that need logits."""
    _combine(
        grid[0],
        input_ids.numpy(),
        idx_mapping.numpy(),
        last_sampled_tokens.view(-1).numpy(),
        query_start_loc.numpy(),
        seq_lens.numpy(),
        prefill_len.numpy(),
        draft_tokens.numpy(),
        cu_num_logits.numpy(),
        logits_indices.numpy(),
        NUM_NEW_SAMPLED_TOKENS,
    )


@nb.njit(cache=True)
def _sampled_and_rejected(num_reqs, sampled, rejected, seq_lens, cu_logits, index, lens):
    for row in range(num_reqs):
        if seq_lens[row] < lens[index[row]]:
            sampled[row] = 0  # a prompt chunk before the last one samples nothing
            rejected[row] = 0
        else:
            rejected[row] = cu_logits[row + 1] - cu_logits[row] - sampled[row]


@twin(_INPUT_BATCH, "_get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(
    grid: tuple[int, ...],
    num_sampled: torch.Tensor,  # [B] int32, rewritten
    num_rejected: torch.Tensor,  # [B] int32, written
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """Sampled and rejected tokens per request; both zero while its prompt is unfinished."""
    _sampled_and_rejected(
        grid[0],
        num_sampled.numpy(),
        num_rejected.numpy(),
        seq_lens.numpy(),
        cu_num_logits.numpy(),
        idx_mapping.numpy(),
        prefill_len.numpy(),
    )


@nb.njit(cache=True)
def _post_update(
    num_reqs, index, computed, last, counts, sampled, num_sampled, rejected, starts, ids, total
):
    for row in range(num_reqs):
        slot = index[row]
        if slot < 0:
            continue
        old_len = total[slot]
        new = num_sampled[row]
        if new > 0:
            last[slot] = sampled[row, new - 1]
            total[slot] = old_len + new
        for i in range(new):
            token = sampled[row, i]
            ids[slot, old_len + i] = token
            if counts is not None:
                counts[slot, token] += 1
        length = 0
        if starts is not None:
            length = starts[row + 1] - starts[row]
        computed[slot] += length - rejected[row]


@twin(_INPUT_BATCH, "_post_update_kernel")
def post_update(
    grid: tuple[int, ...],
    idx_mapping: torch.Tensor,  # [B], negative: skip the row
    num_computed_tokens: torch.Tensor,  # [R], advanced
    last_sampled_tokens: torch.Tensor,  # [R] or [R, 1], written
    output_bin_counts: torch.Tensor | None,  # [R, vocabulary], counted up
    output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,  # [B, 1 + K]
    sampled_tokens_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,  # [R, L], appended to
    all_token_ids_stride: int,
    total_len: torch.Tensor,  # [R], advanced
) -> None:
    """Append the sampled tokens to the request states and advance their lengths."""
    _post_update(
        grid[0],
        idx_mapping.numpy(),
        num_computed_tokens.numpy(),
        last_sampled_tokens.view(-1).numpy(),
        None if output_bin_counts is None else output_bin_counts.numpy(),
        sampled_tokens.numpy(),
        num_sampled.numpy(),
        num_rejected.numpy(),
        None if query_start_loc is None else query_start_loc.numpy(),
        all_token_ids.numpy(),
        total_len.numpy(),
    )


@nb.njit(cache=True)
def _advance_computed(num_reqs, index, computed, starts):
    for row in range(num_reqs):
        computed[index[row]] += starts[row + 1] - starts[row]


@twin(_INPUT_BATCH, "_post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(
    grid: tuple[int, ...],
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """Advance the computed lengths of a step that sampled nothing."""
    _advance_computed(
        grid[0], idx_mapping.numpy(), num_computed_tokens.numpy(), query_start_loc.numpy()
    )


@nb.njit(cache=True)
def _expand(num_reqs, index, expanded, local_pos, cu_logits):
    for row in range(num_reqs):
        first = cu_logits[row]
        for i in range(cu_logits[row + 1] - first):
            expanded[first + i] = index[row]
            local_pos[first + i] = i


@twin(_INPUT_BATCH, "_expand_idx_mapping_kernel")
def expand_idx_mapping(
    grid: tuple[int, ...],
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,  # [logits], written
    expanded_local_pos: torch.Tensor,  # [logits] int32, written
    cu_num_logits: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """For every row of logits: its request slot and its place within the request."""
    _expand(
        grid[0],
        idx_mapping.numpy(),
        expanded_idx_mapping.numpy(),
        expanded_local_pos.numpy(),
        cu_num_logits.numpy(),
    )


@nb.njit(cache=True)
def _prompt_targets(num_reqs, out, starts, index, computed, ids):
    for row in range(num_reqs):
        slot = index[row]
        start = starts[row]
        for i in range(starts[row + 1] - start):
            # The last token of the buffer has no successor; its logprob is never read.
            position = min(computed[slot] + 1 + i, ids.shape[1] - 1)
            out[start + i] = ids[slot, position]


@twin(_PROMPT_LOGPROB, "_prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    grid: tuple[int, ...],
    prompt_logprobs_token_ids: torch.Tensor,  # [tokens] int64, written
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """The token after each scheduled one: the one whose log-probability is asked for."""
    _prompt_targets(
        grid[0],
        prompt_logprobs_token_ids.numpy(),
        query_start_loc.numpy(),
        idx_mapping.numpy(),
        num_computed_tokens.numpy(),
        all_token_ids.numpy(),
    )
