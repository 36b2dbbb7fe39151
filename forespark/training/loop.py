"""The training loop of both drafters.

speculators gives the models, their configuration and checkpoint format; the loop is ours,
because its trainer moves the model to a CUDA rank and saves neither the generator nor the
position in the data. Every random choice of a step derives from (seed, step, rank), so a
resumed run repeats the losses of an uninterrupted one bit for bit.
"""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any

import torch

from forespark.config import Config
from forespark.models.base import LossRows, cycle_length, draw_rows, state_scale
from forespark.models.blocks import select_anchors
from forespark.models.drafter import ForeSparkDrafter
from forespark.models.dspark import DSparkDrafter
from forespark.record import append_jsonl, provenance, read_jsonl, write_text
from forespark.training import checkpoint, rows
from forespark.training.build import FRESH
from forespark.training.export import export_drafter
from forespark.training.optim import build_optimizers, lr_factor, set_lr
from forespark.training.ranks import Ranks
from forespark.training.states import StateCache

GRADIENT_CLIP = 1.0
SCALE_ROWS = 32  # corpus rows that measure the captured states
WARMUP_WITHOUT_END = 50  # steps, when only a time limit bounds the run


def reduce_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """``x_sum`` over ``x_total`` for every x with a total."""
    return {
        name.removesuffix("_sum"): value / metrics[name.removesuffix("_sum") + "_total"]
        for name, value in metrics.items()
        if name.endswith("_sum") and metrics.get(name.removesuffix("_sum") + "_total", 0.0) > 0
    }


class Trainer:
    """One training run in ``folder``; ``fit`` resumes from the newest checkpoint there."""

    def __init__(
        self,
        config: Config,
        model: ForeSparkDrafter | DSparkDrafter,
        states: StateCache,
        *,
        name: str,
        sources: list[Path],
        folder: Path,
        out: Path,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.train = config, config.train
        self.model, self.states, self.name = model, states, name
        self.sources, self.folder, self.out = sources, Path(folder), Path(out)
        self.optimizers = build_optimizers(
            model,
            name=self.train.optimizer,
            lr=self.train.dspark_lr if name == "dspark" else self.train.lr,
            muon_lr=self.train.muon_lr,
            weight_decay=self.train.weight_decay,
        )
        self.ranks = ranks or Ranks()
        self.step = self.epoch = self.batch = 0
        self.elapsed = 0.0  # seconds of wall clock over all sessions
        self.order: list[str] = []
        self.stop = False
        self.corpus: dict[str, rows.CorpusRow] = {}
        self.held_out: list[rows.CorpusRow] = []
        self.frequent: torch.Tensor | None = None
        self.vocabulary = model.core.lm_head.weight.shape[0]

    # -- data ---------------------------------------------------------------------------

    def _read(self) -> None:
        found = rows.read_rows(self.sources, self.train.limit, self.train.most_repeated)
        self.corpus = {row.id: row for row in found}
        training, held_out = rows.split_rows(found, self.train.validation_fraction)
        self.held_out = sorted(held_out, key=lambda row: row.id)[: self.train.validation_rows]
        self._training = training

    def _start_epoch(self) -> None:
        """Read the sources again; a restored order keeps its rows, new ones join later."""
        self._read()
        if any(name not in self.corpus for name in self.order):
            print("the corpus changed since the checkpoint: starting a new epoch", flush=True)
            self.epoch, self.batch, self.order = self.epoch + 1, 0, []
        if not self.order:
            self.order = rows.epoch_order(self._training, self.train.seed, self.epoch)
        lengths = {name: len(self.corpus[name].input_ids) for name in self.order}
        self.packs = rows.pack(self.order, lengths, self.train.total_seq_len)
        self.batches = math.ceil(len(self.packs) / self.ranks.size)  # steps of the epoch
        if self.train.loss_vocab is not None:
            present = [self.corpus[name] for name in self.order]
            self.frequent = rows.frequent_tokens(present, self.train.loss_vocab)

    # -- one step -----------------------------------------------------------------------

    def _progress(self) -> float:
        shares = [0.0]
        steps = self.train.max_steps
        if steps is None and self.train.max_minutes is None:
            steps = self.train.epochs * self.batches
        if steps is not None:
            shares.append(self.step / steps)
        if self.train.max_minutes is not None:
            shares.append(self.elapsed / 60.0 / self.train.max_minutes)
        return max(shares)

    def _warmup(self) -> int:
        steps = self.train.max_steps
        if steps is None and self.train.max_minutes is not None:
            return WARMUP_WITHOUT_END
        total = steps if steps is not None else self.train.epochs * self.batches
        return max(1, round(self.train.warmup_ratio * total))

    def loss_of(self, rank: int) -> tuple[torch.Tensor, dict[str, Any], float]:
        """Loss and metrics of one rank's packed row in this step, and its number of anchors."""
        place = self.batch * self.ranks.size + rank
        draw = self.step * self.ranks.size + rank
        generator = torch.Generator().manual_seed(self.train.seed * 1_000_003 + draw)
        # The last step of an epoch may have fewer packed rows than ranks: some come twice.
        documents = [self.corpus[name] for name in self.packs[place % len(self.packs)]]
        row = self.states.row(documents, self.train.total_seq_len)
        anchors = select_anchors(row, self.train.max_anchors, generator)
        vocabulary = LossRows()
        if self.frequent is not None:
            vocabulary = draw_rows(
                self.frequent, row.input_ids, self.train.loss_vocab_samples, self.vocabulary,
                generator,
            )  # fmt: skip
        length = cycle_length(self.step, self.model.num_speculative_tokens)
        loss, metrics = self.model(row, anchors, length, vocabulary)
        return loss, metrics, float(anchors.numel())

    def _train_step(self) -> dict[str, float]:
        factor = lr_factor(
            self.train.schedule, self.step, self._warmup(), self._progress(),
            self.train.decay_fraction,
        )  # fmt: skip
        set_lr(self.optimizers, factor)
        warming = self.step < self.train.ce_warmup_steps
        self.model.options.ce_weight = 1.0 if warming else self.train.ce_weight
        self.model.options.tv_weight = 0.0 if warming else self.train.tv_weight
        loss, metrics, anchors = self.loss_of(self.ranks.rank)
        loss.backward()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.ranks.average_gradients(trained)
        norm = torch.nn.utils.clip_grad_norm_(trained, GRADIENT_CLIP)
        if not torch.isfinite(norm):
            raise ValueError(
                f"step {self.step}: the gradient is not finite (loss {float(loss)}); the last "
                f"checkpoint in {self.folder} is intact: lower train.lr and train.muon_lr"
            )
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        values = {key: float(value) for key, value in metrics.items()}
        values = self.ranks.total({**values, "anchors": anchors})
        return {**reduce_metrics(values), "lr_factor": factor, "grad_norm": float(norm),
                "anchors": values["anchors"],
                "length": float(cycle_length(self.step, self.model.num_speculative_tokens)),
                }  # fmt: skip

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Metrics on held-out rows over the whole vocabulary, always the same anchors."""
        totals: dict[str, float] = {}
        generator = torch.Generator().manual_seed(self.train.seed + self.ranks.rank)
        k = self.model.num_speculative_tokens
        for document in self.held_out[self.ranks.rank :: self.ranks.size]:
            row = self.states.row([document], self.train.total_seq_len)
            anchors = select_anchors(row, self.train.validation_anchors, generator)
            if anchors.numel() == 0:
                continue
            _, metrics = self.model(row, anchors, k, LossRows())
            for key, value in metrics.items():
                totals[key] = totals.get(key, 0.0) + float(value)
        return reduce_metrics(self.ranks.total(totals))

    # -- the run ------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch, "order": self.order,
                "elapsed_s": self.elapsed, "drafter": self.name,
                "provenance": provenance()}  # fmt: skip

    def save(self) -> None:
        if self.ranks.first:
            folder = self.folder / "checkpoints"
            checkpoint.save(folder, self.model, self.optimizers, self._state())

    def resume(self) -> bool:
        """Restore the newest checkpoint; the learning curve forgets what came after it."""
        (found,) = self.ranks.agree(checkpoint.latest(self.folder / "checkpoints"))
        if found is None:
            return False
        assert isinstance(found, Path)
        state = checkpoint.load(found, self.model, self.optimizers)
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]
        self.order, self.elapsed = state["order"], state["elapsed_s"]
        curve = self.folder / "metrics.jsonl"
        if self.ranks.first and curve.exists():
            import json

            kept = [line for line in read_jsonl(curve) if line["step"] <= self.step]
            write_text(curve, "".join(json.dumps(line) + "\n" for line in kept))
        return True

    def _log(self, split: str, values: dict[str, float], writer: Any) -> None:
        if not self.ranks.first:
            return
        record = {"step": self.step, "split": split, "epoch": self.epoch,
                  "elapsed_s": round(self.elapsed, 1), **values}  # fmt: skip
        append_jsonl(self.folder / "metrics.jsonl", record)
        writer(split, values, self.step)

    def _checked(self, writer: Any) -> None:
        values = self.validate()
        if not self.ranks.first:
            return
        self._log("validation", values, writer)
        shown = {
            key: round(values[key], 4)
            for key in ("accepted_length", "loss", "post_bce", "pre_bce", "pre_token_error")
            if key in values
        }
        print(f"step {self.step} epoch {self.epoch} {self.elapsed / 60:.1f} min "
              f"validation {shown}", flush=True)  # fmt: skip
        self._export({"step": self.step, "elapsed_s": self.elapsed, "validation": values})

    def _export(self, info: dict[str, Any]) -> None:
        export_drafter(self.model, self.out, target=self.config.target.name, info=info)

    def fit(self, writer: Any) -> Path:
        """Train to the end of the schedule (or a signal), leaving checkpoint and export."""

        def request_stop(signum: int, _frame: Any) -> None:
            self.stop = True

        previous = {s: signal.signal(s, request_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._run(writer)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        self.save()
        if self.stop and self.ranks.first:
            print(f"stopped at step {self.step}; run the same command again to resume", flush=True)
        self._checked(writer)
        return self.out

    def _set_scale(self) -> None:
        """Scale the captured states by their size on the first rows of the run."""
        scale = None
        if self.ranks.first:
            parts = [
                self.states.row([self.corpus[name]], self.train.total_seq_len).states[1:]
                for name in self.order[:SCALE_ROWS]
            ]
            scale = state_scale(torch.cat(parts)).cpu()
        (scale,) = self.ranks.agree(scale)
        assert isinstance(scale, torch.Tensor)
        fusion = self.model.core.fc
        fusion.input_scale.copy_(scale)
        if self.config.drafter.init not in FRESH:
            with torch.no_grad():  # trained weights read unscaled states
                fusion.weight.div_(fusion.input_scale)

    def _run(self, writer: Any) -> None:
        self._start_epoch()
        if self.step == 0:
            self._set_scale()
        if self.ranks.first:
            print(f"{self.name}: {len(self._training)} training rows, {len(self.held_out)} held "
                  f"out, {self.batches} steps an epoch, from step {self.step}",
                  flush=True)  # fmt: skip
        if self.step == 0 and self.config.drafter.init not in FRESH:
            self._checked(writer)  # what training starts from
        began = time.monotonic() - self.elapsed
        while not self.stop and self._progress() < 1.0:
            if self.batch >= self.batches:
                self.epoch, self.batch, self.order = self.epoch + 1, 0, []
                self._start_epoch()
            started = time.monotonic()
            values = self._train_step()
            self.step, self.batch = self.step + 1, self.batch + 1
            self.elapsed = time.monotonic() - began
            self._agree()
            values["step_s"] = round(time.monotonic() - started, 3)
            self._log("train", values, writer)
            if self.step % 10 == 0 and self.ranks.first:
                print(f"step {self.step} loss {values.get('loss', 0.0):.4f} accepted "
                      f"{values.get('accepted_length', 0.0):.3f} {values['step_s']:.1f} s",
                      flush=True)  # fmt: skip
            if self.step % self.train.checkpoint_every == 0:
                self.save()
            if self.step % self.train.validate_every == 0:
                self._checked(writer)

    def _agree(self) -> None:
        """One clock and one decision to stop, or ranks would end at different steps."""
        (elapsed,) = self.ranks.agree(self.elapsed)
        assert isinstance(elapsed, float)
        self.elapsed, self.stop = elapsed, self.ranks.any(self.stop)
