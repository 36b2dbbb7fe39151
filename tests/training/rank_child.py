"""Ranks of a training run: ``python rank_child.py LOG OVERRIDE ...``.

Imports once, then forks as many ranks as ``WORLD_SIZE`` says, each with the environment that
torchrun would give it. Rank r writes to LOG followed by r, and at its end a digest of its weights.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch

from forespark.config import load
from forespark.training import run as entry
from forespark.training.loop import Trainer


def main(overrides: list[str]) -> None:
    torch.set_num_threads(1)
    trainers = []

    class Seen(Trainer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            trainers.append(self)

    entry.Trainer = Seen
    entry.run(load(overrides), "forespark")
    digest = hashlib.sha256()
    for _, parameter in sorted(trainers[0].model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    print(f"weights {digest.hexdigest()} step {trainers[0].step}", flush=True)


if __name__ == "__main__":
    children = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            out = os.open(f"{sys.argv[1]}{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            main(sys.argv[2:])
            sys.exit()
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
