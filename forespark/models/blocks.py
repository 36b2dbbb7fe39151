"""Draft blocks in training: which anchors, which labels, and the backbone over them.

Symbols: T = tokens of a packed row, A = anchors, W = slots of a block (the anchor and d
masks for DFlash 2; K slots for DSpark, which predicts from its anchor too), H = hidden
size. Attention follows the paper, Section 4.1: a block sees its document's context before
the anchor (as keys and values made from the fused target features) and itself, both ways;
a directional drafter's block sees only its earlier slots (Section 4.2), so that a short draft
is the beginning of a long one.

speculators runs this as one masked attention over [A*W, T + A*W]; blocks never see each
other, so here each document's blocks attend to its own context and, separately, to
themselves, under one softmax. Same numbers, a quarter of the arithmetic, any W.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class Row:
    """Documents packed back to back, with the target's hidden states.

    ``states`` are the captured layers side by side, ``last`` the residual stream before
    the target's final norm; both may be bfloat16.
    """

    input_ids: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T] bool: tokens the target wrote
    lengths: list[int]  # tokens of each document; they sum to T
    states: torch.Tensor  # [T, layers * H]
    last: torch.Tensor  # [T, H]

    def position_ids(self) -> torch.Tensor:
        """Position inside its document, [T]."""
        return torch.cat([torch.arange(n) for n in self.lengths] or [torch.zeros(0).long()])

    def ends(self) -> torch.Tensor:
        """Row index one past the token's document, [T]."""
        ends = torch.tensor(self.lengths, dtype=torch.long).cumsum(0)
        return torch.repeat_interleave(ends, torch.tensor(self.lengths, dtype=torch.long))


def label_mask(
    row: Row,
    anchors: torch.Tensor,  # [A] row indices
    slots: int,  # labelled draft positions per block
) -> torch.Tensor:
    """Which of the tokens anchor+1..anchor+slots carry a label, [A, slots] bool.

    A label needs a token of the same document that the target wrote, and none without a
    label before it: a draft is accepted as a prefix, so what follows a gap is never
    reached. Tails past a document's end therefore carry none.
    """
    index = anchors[:, None] + torch.arange(1, slots + 1)
    inside = index < row.ends()[anchors][:, None]
    written = row.loss_mask[index.clamp(max=row.input_ids.numel() - 1)]
    return (inside & written).to(torch.int8).cumprod(dim=-1).bool()


def select_anchors(
    row: Row,
    limit: int | None,  # None: every usable position
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Random anchors among tokens the target wrote whose successor has a label, [A] sorted.

    Empty when the row has none (a prompt without an answer, documents of one token).
    """
    total = row.input_ids.numel()
    candidates = torch.nonzero(row.loss_mask).squeeze(-1)
    # A document's first token has no context to draft from.
    starts = torch.tensor([0, *row.lengths], dtype=torch.long).cumsum(0)[:-1]
    candidates = candidates[~torch.isin(candidates, starts)]
    if total == 0 or candidates.numel() == 0:
        return torch.zeros(0, dtype=torch.long)
    candidates = candidates[label_mask(row, candidates, 1)[:, 0]]
    if limit is None or candidates.numel() <= limit:
        return candidates
    # Drawn on the host: the same anchors on any device.
    chosen = torch.randperm(candidates.numel(), generator=generator, device="cpu")[:limit]
    return candidates[chosen.to(candidates.device)].sort().values


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def grouped_conv(
    x: torch.Tensor,  # [A, W, H]
    delta: torch.Tensor,  # [A, W, taps, groups]
    base: torch.Tensor,  # [taps, H]
) -> torch.Tensor:
    """DFlash 2's token-conditioned causal convolution inside each block, [A, W, H]."""
    blocks, width, hidden = x.shape
    taps, groups = delta.shape[-2:]
    grouped = x.view(blocks, width, groups, hidden // groups)
    kernel = base.view(taps, groups, hidden // groups)
    out = grouped * (kernel[0] + delta[:, :, 0].unsqueeze(-1))
    for tap in range(1, min(taps, width)):
        # Slots before ``tap`` have no predecessor that far back inside their block.
        term = grouped[:, :-tap] * (kernel[tap] + delta[:, tap:, tap].unsqueeze(-1))
        out = out + functional.pad(term, (0, 0, 0, 0, tap, 0))
    return out.reshape(x.shape)


def _convolve(conv: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kernels = conv.kernel_projection(x).view(*x.shape[:-1], 2, conv.kernel_size, conv.num_groups)
    return grouped_conv(x, kernels[..., 0, :, :], conv.base_kernel[0]), kernels[..., 1, :, :]


class Context:
    """Fused context features of one row and, per layer, their keys and values."""

    def __init__(self, core: nn.Module, row: Row) -> None:
        self.row = row
        states = row.states.float()
        if hasattr(core.fc, "input_scale"):
            states = states * core.fc.input_scale
        self.features = core.hidden_norm(core.fc(states))  # [T, H]: c
        self.cos, self.sin = (
            part[0] for part in core.rotary_emb(self.features, row.position_ids()[None])
        )
        self.starts = torch.tensor([0, *row.lengths], dtype=torch.long).cumsum(0)[:-1].tolist()


def _attention(
    attention: nn.Module,
    x: torch.Tensor,  # [A, W, H]
    context: Context,
    anchors: torch.Tensor,  # [A] sorted row indices
    cos: torch.Tensor,  # [A, W, D]
    sin: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    """The block, or its slots so far, plus the context before the anchor, [A, W, H]."""
    blocks, width, _ = x.shape
    dim = attention.head_dim
    q = attention.q_norm(attention.q_proj(x).view(blocks, width, -1, dim))
    k = attention.k_norm(attention.k_proj(x).view(blocks, width, -1, dim))
    v = attention.v_proj(x).view(blocks, width, -1, dim)
    q = _rotate(q, cos.unsqueeze(2), sin.unsqueeze(2)) * attention.scaling
    k = _rotate(k, cos.unsqueeze(2), sin.unsqueeze(2))
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    features = context.features
    ctx_k = attention.k_norm(attention.k_proj(features).view(-1, kv_heads, dim))
    ctx_k = _rotate(ctx_k, context.cos.unsqueeze(1), context.sin.unsqueeze(1))
    ctx_v = attention.v_proj(features).view(-1, kv_heads, dim)
    q = q.view(blocks, width, kv_heads, group, dim)
    # [A, kv, W, g, dim] x [A, kv, dim, W]: scores against the block itself.
    own = q.permute(0, 2, 1, 3, 4).reshape(blocks, kv_heads, width * group, dim)
    own_scores = own @ k.permute(0, 2, 3, 1)
    if causal:
        slot = torch.arange(width)
        later = slot > slot.repeat_interleave(group)[:, None]  # [W*g, W]
        own_scores = own_scores.masked_fill(later, float("-inf"))
    own_v = v.permute(0, 2, 1, 3)  # [A, kv, W, dim]
    outputs = []
    for start, length in zip(context.starts, context.row.lengths, strict=True):
        low, high = (int((anchors < bound).sum()) for bound in (start, start + length))
        if low == high:
            continue
        local = anchors[low:high] - start
        seen = int(local[-1])  # no block of this document sees further
        keys = ctx_k[start : start + seen].permute(1, 2, 0)  # [kv, dim, S]
        values = ctx_v[start : start + seen].permute(1, 0, 2)  # [kv, S, dim]
        count = high - low
        query = own[low:high].transpose(0, 1).reshape(kv_heads, -1, dim)
        scores = (query @ keys).view(kv_heads, count, width * group, seen)
        hidden = torch.arange(seen) >= local[:, None]  # [count, S]
        scores = scores.masked_fill(hidden[None, :, None, :], float("-inf"))
        both = torch.cat([scores, own_scores[low:high].transpose(0, 1)], dim=-1)
        probs = torch.softmax(both, dim=-1)
        ctx_part = probs[..., :seen].reshape(kv_heads, -1, seen) @ values
        own_part = probs[..., seen:].transpose(0, 1) @ own_v[low:high]
        mixed = ctx_part.view(kv_heads, count, width * group, dim).transpose(0, 1) + own_part
        outputs.append(mixed.view(count, kv_heads, width, group, dim))
    out = torch.cat(outputs).permute(0, 2, 1, 3, 4).reshape(blocks, width, -1)
    return attention.o_proj(out)


def draft_hidden(
    core: nn.Module,  # speculators' DFlash-family draft model
    context: Context,
    anchors: torch.Tensor,  # [A] sorted row indices
    width: int,  # W
    causal: bool = False,  # directional: a slot sees itself and those before it
) -> torch.Tensor:
    """Last hidden states of every slot, after the drafter's norm, [A, W, H]."""
    row = context.row
    ids = torch.full((anchors.numel(), width), core.mask_token_id, dtype=torch.long)
    ids[:, 0] = row.input_ids[anchors]
    x = core.embed_tokens(ids)
    positions = row.position_ids()[anchors][:, None] + torch.arange(width)
    cos, sin = core.rotary_emb(x, positions)
    for layer in core.layers:
        convolved = hasattr(layer, "attention_conv")
        h = layer.input_layernorm(x)
        if convolved:
            h, kernel = _convolve(layer.attention_conv, h)
        h = _attention(layer.self_attn, h, context, anchors, cos, sin, causal)
        if convolved:
            h = grouped_conv(h, kernel, layer.attention_conv.base_kernel[1])
        x = x + h
        h = layer.post_attention_layernorm(x)
        if convolved:
            h, kernel = _convolve(layer.mlp_conv, h)
        h = layer.mlp(h)
        if convolved:
            h = grouped_conv(h, kernel, layer.mlp_conv.base_kernel[1])
        x = x + h
    return core.norm(x)
