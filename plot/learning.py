"""Learning curves of the drafters: accepted length and estimator loss against steps.

    python plot/learning.py --target smollm2
    python plot/learning.py --records results/cpu/train --out results/cpu/figures

Reads ``<drafter>/metrics.jsonl`` of every drafter in the folder of records, and
``metrics-2.jsonl`` and so on where later runs went on from the trained drafter
(``drafter.init``). Lines are held-out values over the whole vocabulary, one for each run, as
its held-out rows are its own; thin dots are single training steps where they are recorded.
Writes learning.pdf, learning.png, learning.csv and the last values as learning.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import read_jsonl, write_text

# (column of metrics.jsonl, axis label)
PANELS = (
    ("accepted_length", "accepted length (tokens)"),
    ("post_brier", "Brier score, post-draft estimate"),
)


def read(folder: Path, heads: bool = False) -> pd.DataFrame:
    """One row per logged step of every drafter: drafter, run, step, split and the metrics.

    Steps and seconds count on from one run to the next.

    Args:
        heads: also folders ``heads*``, whose drafter does not learn.

    Raises:
        ValueError: a row without step or split, or with a metric that is no number; names
            file, line and field.
    """
    frames = []
    for place in sorted(path for path in folder.glob("*") if path.is_dir()):
        if place.name.startswith("heads") and not heads:
            continue
        steps, seconds = 0, 0.0
        for number, path in enumerate(sorted(place.glob("metrics*.jsonl"), key=_order)):
            rows = read_jsonl(path)
            for line, row in enumerate(rows, start=1):
                _check(row, f"{path}, line {line}")
            if not rows:  # training has just begun
                continue
            frame = pd.DataFrame(rows).assign(drafter=place.name, run=number)
            frame["step"] += steps
            steps = int(frame["step"].max())
            if "elapsed_s" in frame:
                frame["elapsed_s"] += seconds
                seconds = float(frame["elapsed_s"].max())
            frames.append(frame)
    return pd.concat(frames) if frames else pd.DataFrame(columns=["drafter", "step", "split"])


def _order(path: Path) -> int:
    """Place of a run among the runs of its drafter: metrics.jsonl, metrics-2.jsonl, ..."""
    number = path.stem.removeprefix("metrics").removeprefix("-")
    return int(number) if number.isdigit() else 1


def _check(row: Any, where: str) -> None:
    results.require(isinstance(row, dict), where, row, "one object a line")
    if missing := sorted({"step", "split"} - set(row)):
        raise ValueError(f"{where}: missing fields {missing}")
    results.require(results.is_number(row["step"]), f"{where}: step", row["step"], "a number")
    for name in ("elapsed_s", *(column for column, _ in PANELS)):
        value = row.get(name)
        ok = value is None or results.is_number(value)
        results.require(ok, f"{where}: {name}", value, "a number or null")


def draw(frame: pd.DataFrame, target: str) -> Any:
    """One panel per metric, one line per drafter."""
    fig, panels = style.figure(width=style.PAGE_IN, height=2.6, columns=len(PANELS))
    drafters = style.in_order(frame["drafter"])
    for axes, (column, label) in zip(panels, PANELS, strict=True):
        drawn = [name for name in drafters if _line(axes, frame, name, column)]
        if drawn:
            axes.set_xlabel("training step")
            axes.set_ylabel(label)
            axes.grid(True, linewidth=0.3, color="#dddddd")
            axes.legend(frameon=False)
        else:
            style.empty(axes, f"no training records of {target} yet")
    return fig


def _line(axes: Any, frame: pd.DataFrame, drafter: str, column: str) -> bool:
    """Draw one drafter; False when it has no such metric."""
    rows = frame[(frame["drafter"] == drafter)]
    if column not in rows or not rows[column].notna().any():
        return False
    look = style.look(drafter)
    steps = rows[rows["split"] == "train"]
    axes.plot(steps["step"], steps[column], ".", color=look.color, alpha=0.12, markersize=2)
    held_out = rows[rows["split"] == "validation"].dropna(subset=[column])
    for number, part in held_out.groupby("run"):
        axes.plot(part["step"], part[column], label=look.label if number == 0 else None,
                  color=look.color, marker=look.marker, linestyle=look.line, zorder=3)  # fmt: skip
    return True


def render(frame: pd.DataFrame) -> str:
    """Markdown table of every drafter's last held-out values; "n/a" where there is none."""
    lines = ["| drafter | steps | hours | accepted length, held out | Brier score, post-draft |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    held_out = frame[frame["split"] == "validation"]
    for name in style.in_order(held_out["drafter"]):
        last = held_out[held_out["drafter"] == name].sort_values("step").iloc[-1]
        cells = [
            "n/a" if pd.isna(last.get(column)) else f"{last[column] / unit:{form}}"
            for column, unit, form in (
                ("elapsed_s", 3600, ".1f"),
                ("accepted_length", 1, ".2f"),
                ("post_brier", 1, ".3f"),
            )
        ]
        lines.append(f"| {' | '.join([style.look(name).label, str(last['step']), *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    folder, out, target = results.parse(__doc__, "train", "<drafter>/metrics.jsonl")
    frame = read(folder)
    text = render(frame)
    paths = style.save(draw(frame, target), out, "learning")
    kept = ["drafter", "step", "split", *(name for name, _ in PANELS)]
    held_out = frame[frame["split"] == "validation"]
    write_text(out / "learning.csv", held_out.reindex(columns=kept).to_csv(index=False))
    write_text(out / "learning.md", text)
    print(*paths, out / "learning.csv", out / "learning.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
