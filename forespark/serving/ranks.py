"""Tensor-parallel ranks that must schedule alike: rank 0 decides, the others copy.

Ranks add the same numbers in different orders, so their scores differ in the last bits. A
tie that breaks differently gives two ranks batches of different shapes, and the next
collective operation waits for ever. Every number that a schedule is made of is therefore
rank 0's (paper, Section 5): latency tables once at start, and in each step pre-draft
scores, draft tokens with their post-draft survival, and acceptance decisions.

A message is one broadcast of the bytes of several tensors. On a GPU it runs in stream
order, so the host waits for nothing. With one rank nothing is sent or copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """One group of ranks.

    Args:
        device_group: process group of the device tensors; None for a single rank.
        host_group: process group of host tensors; None uses ``device_group``.

    Attributes:
        size: ranks in the group.
        rank: ours, 0 for the one that decides.
    """

    def __init__(
        self,
        device_group: dist.ProcessGroup | None = None,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._device_group = device_group
        self._host_group = host_group or device_group
        self.size, self.rank, self._first = 1, 0, 0
        if device_group is not None:
            self.size, self.rank = dist.get_world_size(device_group), dist.get_rank(device_group)
            self._first = dist.get_global_rank(device_group, 0)

    @classmethod
    def of_engine(cls) -> Ranks:
        """The tensor-parallel ranks of the vLLM worker that this process is."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return cls() if group.world_size == 1 else cls(group.device_group, group.cpu_group)

    def share(self, *tensors: torch.Tensor) -> None:
        """Overwrite ``tensors`` by rank 0's, in one broadcast.

        Every rank passes tensors of the same shapes and types, on the group's device: the
        shapes of a batch are decided by the scheduler and by what was shared before.
        """
        if self.size == 1:
            return
        # Wide types first: each part of the message then starts on a multiple of its width.
        parts = sorted(tensors, key=lambda tensor: -tensor.element_size())
        message = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        dist.broadcast(message, src=self._first, group=self._device_group)
        if self.rank == 0:
            return
        begin = 0
        for part in parts:
            end = begin + part.numel() * part.element_size()
            part.copy_(message[begin:end].view(part.dtype).view(part.shape))
            begin = end

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on rank 0 (JSON values), on every rank. Host only, at start.

        Raises:
            ValueError: ``make`` raised it on rank 0; every rank raises the same message, so
                none is left waiting for the others.
        """
        if self.size == 1:
            return make()
        answer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                answer = {"value": make()}
            except ValueError as error:
                answer = {"error": str(error)}
        answer = json.loads(self._send_bytes(json.dumps(answer).encode()))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def _send_bytes(self, content: bytes) -> bytes:
        """Rank 0's ``content``, whatever the others pass."""
        length = torch.tensor([len(content)])
        dist.broadcast(length, src=self._first, group=self._host_group)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(buffer, src=self._first, group=self._host_group)
        return bytes(buffer.numpy())


def check_parallel(parallel: Any, arm: str) -> None:
    """Refuse what the packed layout and the shared schedule do not cover.

    Args:
        parallel: vLLM's ``parallel_config``. Tensor and expert parallelism are served.

    Raises:
        ValueError: data, pipeline or context parallelism.
    """
    kinds = ("data", "pipeline", "prefill_context", "decode_context")
    sizes = {kind: getattr(parallel, f"{kind}_parallel_size") for kind in kinds}
    wrong = [f"{kind}_parallel_size={size}" for kind, size in sizes.items() if size > 1]
    if wrong:
        raise ValueError(
            f"arm {arm}: got {', '.join(wrong)}, want 1: budgets are agreed on by "
            "tensor-parallel ranks only; use tensor_parallel_size, or one server per replica"
        )
