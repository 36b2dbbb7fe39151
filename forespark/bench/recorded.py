"""Drafts of the calibration runs as material for replay: one anchor, every draft length.

The runs draft exactly d tokens for d = 1..K over the same prompts, greedily and without
loss, so they pass the same anchors. Where all K runs drafted from one anchor, the whole
triangle of pre-draft estimates is known beside what really became of a draft of every
length, and any schedule can be replayed on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forespark.fore_d.calibrated import Calibration
from forespark.fore_d.costs import CostTables
from forespark.fore_d.survival import entries, post_survival, survival
from forespark.record import read_json, read_jsonl

RECORDED, SYNTHETIC = "recorded", "synthetic"


@dataclass(frozen=True)
class Drafts:
    """S anchors; row d - 1 belongs to the draft of length d."""

    pre: np.ndarray  # [S, K, K] float64, survival estimated before drafting
    post: np.ndarray  # [S, K, K] float64, after drafting; 0 past d
    accepted: np.ndarray  # [S, K] int64, accepted tokens of the length-d draft
    source: str  # recorded | synthetic

    @property
    def K(self) -> int:
        return self.pre.shape[1]

    def __len__(self) -> int:
        return len(self.pre)

    def batches(self, n: int, seed: int, limit: int | None) -> list[Drafts]:
        """Batches of n anchors in a seeded order; an anchor is used once, a rest left out."""
        order = np.random.default_rng(seed).permutation(len(self))
        count = len(self) // n if limit is None else min(len(self) // n, limit)
        return [self._take(order[i * n : (i + 1) * n]) for i in range(count)]

    def _take(self, index: np.ndarray) -> Drafts:
        parts = (self.pre[index], self.post[index], self.accepted[index])
        return Drafts(*parts, self.source)


def load(
    run_dir: Path, calibration: Path, drafter_sha256: str, target: str
) -> tuple[Drafts, CostTables]:
    """Recorded drafts and measured prices of a run folder.

    The prices may come from another machine: nothing is served.

    Raises:
        ValueError: traces, calibration or tables are missing or of another drafter.
    """
    wanted = {"target": target, "drafter_sha256": drafter_sha256}
    fitted = Calibration.from_record(read_json(calibration), wanted, str(calibration))
    path = run_dir / "latency.json"
    if not path.is_file():
        raise ValueError(f"no latency tables in {path}: run `python curves.py --target {target}`")
    costs = CostTables.from_record(read_json(path), source=str(path))
    return read_drafts(run_dir / "traces" / drafter_sha256[:12], fitted), costs


def read_drafts(folder: Path, fitted: Calibration) -> Drafts:
    """Anchors from which every length was drafted and wholly verified.

    Args:
        folder: ``forespark-d<d>.jsonl`` of calibrate.py.
        fitted: calibration of the same drafter, triangle form.

    Raises:
        ValueError: a length is missing, the files are of another drafter, or they share no
            anchor.
    """
    K = int(fitted.key["K"])
    command = f"python calibrate.py --target {fitted.key['target']}"
    if fitted.pre is None or fitted.pre.form != "triangle":
        raise ValueError(f"{folder}: replay needs estimates of every draft length (triangle form)")
    runs = []
    for d in range(1, K + 1):
        path = folder / f"{fitted.key['drafter']}-d{d}.jsonl"
        if not path.is_file():
            raise ValueError(f"no traces of drafts of length {d} in {path}: run `{command}`")
        runs.append(_read_run(path, d, fitted, command))
    shared = sorted(set.intersection(*(set(run) for run in runs)))
    if not shared:
        raise ValueError(
            f"{folder}: the runs of different lengths share no anchor: run `{command}`"
        )
    drafts = [[run[at] for at in shared] for run in runs]
    z = np.concatenate([[row["z"] for row in rows] for rows in drafts], axis=1)
    scale, bias = (torch.from_numpy(part) for part in fitted.pre.flat())
    pre, _ = survival(torch.tensor(z, dtype=torch.float32), scale, bias, K)
    post = np.zeros((len(shared), K, K))
    for d, rows in enumerate(drafts, start=1):
        logits = torch.zeros(len(shared), K)
        logits[:, :d] = torch.tensor([row["l"] for row in rows])
        theta = torch.tensor(fitted.post.theta)
        lengths = torch.full((len(shared),), d)
        post[:, d - 1] = post_survival(logits, theta, lengths)[0].double().numpy()
    accepted = np.array([[row["a"] for row in rows] for rows in drafts], dtype=np.int64).T
    assert pre.shape[1:] == (K, K) and z.shape[1] == entries(K, "triangle")
    return Drafts(pre.double().numpy(), post, accepted, RECORDED)


def _read_run(
    path: Path, d: int, fitted: Calibration, command: str
) -> dict[tuple[int, int], dict[str, Any]]:
    """Wholly verified drafts of one run by (prompt, anchor position).

    Request names are ``r<number>-...`` and count through all runs, prompt by prompt.
    """
    lines = read_jsonl(path)
    header = lines[0].get("header", {}) if lines else {}
    wrong = [name for name, value in fitted.key.items() if header.get(name) != value]
    if wrong:
        raise ValueError(f"{path}: traces of another drafter ({', '.join(wrong)}): run `{command}`")
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in (row for line in lines[1:] for row in line.get("requests") or []):
        number = int(row["id"].removeprefix("r").partition("-")[0])
        whole = row["d"] == row["v"] == d and row["z"] and row["l"]
        if whole and None not in row["z"] and None not in row["l"]:
            found[number, row["pos"]] = row
    first = min((number for number, _ in found), default=0)
    return {(number - first, position): row for (number, position), row in found.items()}


def synthetic_drafts(rng: np.random.Generator, count: int, K: int) -> Drafts:
    """Drafts of made-up requests: acceptance falls along the draft, every request has its own
    level, rows of different lengths nearly agree, and outcomes follow the estimates."""
    level = rng.normal(0.6, 1.3, (count, 1, 1)) - 0.15 * np.arange(K)
    accept = 1 / (1 + np.exp(-level - 0.05 * rng.normal(size=(count, K, K))))
    inside = np.tril(np.ones((K, K), dtype=bool))
    alive = np.cumprod(np.where(inside, accept, 0.0), axis=2)
    hits = np.cumprod((rng.random((count, 1, K)) < accept) & inside, axis=2)
    return Drafts(alive, alive, hits.sum(axis=2).astype(np.int64), SYNTHETIC)
