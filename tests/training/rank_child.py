"""One rank of a training run: ``python rank_child.py OVERRIDE ...``; prints a digest of weights.

Its place comes from torchrun's environment variables.
"""

from __future__ import annotations

import hashlib
import sys

import torch

from forespark.config import load
from forespark.training import run as entry
from forespark.training.loop import Trainer


def main() -> None:
    torch.set_num_threads(1)
    trainers = []

    class Seen(Trainer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            trainers.append(self)

    entry.Trainer = Seen
    entry.run(load(sys.argv[1:]), "forespark")
    digest = hashlib.sha256()
    for _, parameter in sorted(trainers[0].model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    print(f"weights {digest.hexdigest()} step {trainers[0].step}", flush=True)


if __name__ == "__main__":
    main()
