"""DFlash 2's grouped convolution over packed blocks of different lengths.

Stock vLLM finds a token's place in its block as ``row % block_size``. Packed blocks have
no common size, so the place is given: ``offset`` is 0 at the anchor of each block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class BlockOffsets:
    """Offsets of the rows of the drafter's current batch, shared by all its convolutions.

    Attributes:
        rows: [max_tokens] int64; the first T entries describe the packed batch.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.rows = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def set(self, offset: torch.Tensor) -> None:
        """Describe a packed batch; rows past it are padding and see only themselves."""
        self.rows[: offset.shape[0]].copy_(offset)
        self.rows[offset.shape[0] :].zero_()

    def set_uniform(self, num_tokens: int, block_size: int) -> None:
        """Describe a batch of equal blocks, as dummy and profiling runs use."""
        index = torch.arange(num_tokens, device=self.rows.device)
        self.set(index % block_size)


def grouped_conv(
    hidden: torch.Tensor,  # [T, groups * group_size]
    delta: torch.Tensor,  # [T, taps, groups] token-dependent part of the kernel
    base: torch.Tensor,  # [taps, groups * group_size]
    offset: torch.Tensor,  # [T] place of each row in its block
) -> torch.Tensor:
    """Causal convolution inside each block: row t sees rows t-1 … t-taps+1 of its block.

    Source: DFlash 2's grouped convolution, with ``offset`` in place of ``row % block``.
    """
    if hidden.is_cuda:
        from forespark.serving.kernels.conv import grouped_conv_kernel

        return grouped_conv_kernel(hidden, delta, base, offset)
    taps, groups = delta.shape[1], delta.shape[2]
    blocks = hidden.unflatten(-1, (groups, -1))
    kernel = base.view(1, taps, groups, -1) + delta.unsqueeze(-1)
    out = kernel[:, 0] * blocks
    for tap in range(1, taps):
        earlier = F.pad(blocks[:-tap], (0, 0, 0, 0, tap, 0))[: hidden.shape[0]]
        reaches = (offset >= tap).view(-1, 1, 1)
        # ``where`` and not a product: a padded row may hold anything, NaN included.
        out = out + torch.where(reaches, kernel[:, tap] * earlier, 0.0)
    return out.flatten(-2)


def use_packed_conv(model: torch.nn.Module, offsets: BlockOffsets) -> int:
    """Let every grouped convolution of a loaded drafter read ``offsets``.

    Returns:
        Number of convolutions found; 0 means the drafter is not a DFlash 2.
    """
    found = 0
    for module in model.modules():
        if type(module).__name__ == "DFlashGroupedConv":
            module._convolve = _packed_convolve(module, offsets)  # type: ignore[assignment]
            found += 1
    return found


def _packed_convolve(module: Any, offsets: BlockOffsets) -> Any:
    def convolve(hidden: torch.Tensor, delta: torch.Tensor, side: int) -> torch.Tensor:
        rows = offsets.rows[: hidden.shape[0]]
        return grouped_conv(hidden, delta, module.base_kernel[side], rows)

    return convolve
