"""Data-parallel training under torchrun: one process per device, averaged gradients.

Every rank holds the whole drafter, takes its own packed rows of a step, and applies the
same averaged gradient, so all ranks stay bit for bit alike. Rank 0 keeps checkpoints, curve
and export. Without torchrun there is one rank and nothing is exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_PATIENCE = timedelta(hours=2)  # a rank may wait for hidden states, or for rank 0's server


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Mean over ranks of every gradient; one that a rank has not is zero there."""
        if self.size == 1:
            return
        owners = list(parameters)
        flat = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in owners]
        )
        dist.all_reduce(flat)
        flat /= self.size
        for owner, part in zip(owners, flat.split([p.numel() for p in owners]), strict=True):
            owner.grad = part.view_as(owner).clone()

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, for every name that any rank has."""
        if self.size == 1:
            return values
        found: list[dict[str, float]] = [{} for _ in range(self.size)]
        dist.all_gather_object(found, values)
        names = sorted(set().union(*found))
        return {name: sum(part.get(name, 0.0) for part in found) for name in names}

    def agree(self, *values: object) -> tuple[object, ...]:
        """Rank 0's values on every rank."""
        if self.size == 1:
            return values
        shared = list(values)
        dist.broadcast_object_list(shared, src=0)
        return tuple(shared)

    def any(self, flag: bool) -> bool:
        """Whether it is set on any rank."""
        return self.total({"flag": float(flag)})["flag"] > 0


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started, on their devices, while the block runs.

    Raises:
        ValueError: more ranks on this machine than GPUs, where there are GPUs.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    if cuda and local >= torch.cuda.device_count():
        raise ValueError(
            f"train.processes: rank {local} has no GPU, this machine shows "
            f"{torch.cuda.device_count()}; lower it or widen CUDA_VISIBLE_DEVICES"
        )
    before = torch.get_default_device()
    if cuda:
        torch.cuda.set_device(local)
        torch.set_default_device(f"cuda:{local}")
    ranks = Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    try:
        if ranks.size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_PATIENCE)
        yield ranks
    finally:
        if ranks.size > 1:
            dist.destroy_process_group()
        torch.set_default_device(before)
