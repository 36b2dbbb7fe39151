"""Cost of training: time per iteration and parameters, side by side (paper, Figure 15b, c).

``dflash2`` is the same drafter and loss without the estimators, ``forespark`` with them,
``dspark`` the baseline. Every iteration gives all three the same row, anchors and
vocabulary rows and takes them in turns, in an order that rotates, so that other work on
the machine meets all alike. An iteration is forward pass, backward pass and optimizer
step; the target's hidden states are read before the clock starts, since all need them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from forespark.config import Config, require_model
from forespark.models.base import LossRows, cycle_length, draw_rows
from forespark.models.blocks import Row, select_anchors
from forespark.models.drafter import ForeSparkDrafter
from forespark.models.dspark import DSparkDrafter
from forespark.record import SCHEMA, append_jsonl, provenance, write_json
from forespark.training import rows
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import GRADIENT_CLIP
from forespark.training.optim import build_optimizers
from forespark.training.run import corpus_sources, prepare_torch, state_source

BENCH = "training_cost"
ARMS = ("dflash2", "forespark", "dspark")
WARMUP = 2  # untimed iterations: optimizers allocate their state in the first
PACKS = 8  # training rows in use, in turn


@dataclass
class Work:
    """What one iteration is given."""

    row: Row
    anchors: torch.Tensor  # [A]
    length: int  # d of the pre-draft row
    vocabulary: LossRows


class Learner:
    """One arm's model and optimizers."""

    def __init__(self, config: Config, arm: str) -> None:
        name = "dspark" if arm == "dspark" else "forespark"
        self.arm, self.model = arm, drafter_of(config, name)
        trained = self.model.core if arm == "dflash2" else self.model
        self.parameters = [p for p in trained.parameters() if p.requires_grad]
        train = config.train
        self.optimizers = build_optimizers(
            trained,
            name=train.optimizer,
            lr=train.dspark_lr if name == "dspark" else train.lr,
            muon_lr=train.muon_lr,
            weight_decay=train.weight_decay,
        )

    def iterate(self, work: Work) -> float:
        """Seconds of one training iteration."""
        started = time.perf_counter()
        if self.arm == "dflash2":
            assert isinstance(self.model, ForeSparkDrafter)
            loss, _ = self.model.backbone_loss(work.row, work.anchors, work.vocabulary)
        else:
            loss, _ = self.model(work.row, work.anchors, work.length, work.vocabulary)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, GRADIENT_CLIP)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started


def count_parameters(model: ForeSparkDrafter | DSparkDrafter) -> dict[str, int]:
    """Trained parameters, the target's embedding and head left out, and the estimators' part."""

    def count(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    estimators = 0
    if isinstance(model, ForeSparkDrafter):
        estimators = count(model.pre) + count(model.post)
    return {"drafter": count(model) - estimators, "estimators": estimators}


def _work(config: Config, endpoint: str | None, K: int, vocabulary: int) -> list[Work]:
    """``PACKS`` packed rows of the corpus as training would draw them, lengths still open."""
    train = config.train
    found = rows.read_rows(corpus_sources(config), train.limit, train.most_repeated)
    corpus = {row.id: row for row in found}
    order = rows.epoch_order(found, train.seed, 0)
    lengths = {name: len(corpus[name].input_ids) for name in order}
    packs = rows.pack(order, lengths, train.total_seq_len)[:PACKS]
    frequent = None
    if train.loss_vocab is not None:
        frequent = rows.frequent_tokens(found, train.loss_vocab)
    made = []
    with state_source(config, endpoint) as url:
        states = state_cache(config, url)
        for index, names in enumerate(tqdm(packs, desc="hidden states", unit="row")):
            generator = torch.Generator().manual_seed(train.seed * 1_000_003 + index)
            row = states.row([corpus[name] for name in names], train.total_seq_len)
            anchors = select_anchors(row, train.max_anchors, generator)
            drawn = LossRows()
            if frequent is not None:
                drawn = draw_rows(
                    frequent, row.input_ids, train.loss_vocab_samples, vocabulary, generator
                )
            made.append(Work(row, anchors, K, drawn))
    return made


def measure(config: Config, out: Path, endpoint: str | None = None) -> Path:
    """Time ``train.max_steps`` iterations of every arm; leaves records.jsonl and run.json.

    Iterations cycle through the pre-draft lengths as training does; a multiple of K weighs
    all alike, and is the default (4 K).

    Raises:
        ValueError: no corpus, target, or an ``out`` that holds records already.
    """
    require_model(config.target.model)
    records = out / "records.jsonl"
    if records.exists():
        raise ValueError(f"{records} is there already; one run is one measurement: use another "
                         "--out, or delete the folder")  # fmt: skip
    prepare_torch(config)
    learners = [Learner(config, arm) for arm in ARMS]
    K = config.drafter.num_speculative_tokens
    work = _work(config, endpoint, K, learners[0].model.core.lm_head.weight.shape[0])
    parameters: dict[str, Any] = {x.arm: count_parameters(x.model) for x in learners}
    parameters["dflash2"]["estimators"] = 0
    write_json(
        out / "run.json",
        {"schema": SCHEMA, "bench": BENCH, "target": config.target.name, "K": K,
         "parameters": parameters, "threads": torch.get_num_threads(),
         "tokens": [int(w.row.input_ids.numel()) for w in work],
         "anchors": [int(w.anchors.numel()) for w in work], "provenance": provenance()},
    )  # fmt: skip
    iterations = config.train.max_steps or 4 * K
    for step in tqdm(range(-WARMUP, iterations), desc="iterations", unit="iteration"):
        now = work[step % len(work)]
        now.length = cycle_length(max(step, 0), K)
        turn = step % len(learners)
        for learner in [*learners[turn:], *learners[:turn]]:
            seconds = learner.iterate(now)
            if step >= 0:
                row = {"schema": SCHEMA, "bench": BENCH, "arm": learner.arm, "iteration": step,
                       "length": now.length, "seconds": seconds}  # fmt: skip
                append_jsonl(records, row)
    return records
