"""Estimators fitted on a fixed drafter beside those trained with it, as a table.

    python plot/heads.py --target smollm2
    python plot/heads.py --records results/cpu/train --out results/cpu/figures

Reads the last held-out values of ``forespark/metrics*.jsonl`` (train.py) and of
``heads*/metrics.jsonl`` (heads.py, in the same folder of records). Writes heads.md and
heads.csv. Both judge the same rows only if both were run on the same corpus.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before pandas)
import learning
import pandas as pd
import results

from forespark.record import write_text

JOINT, HEADS = "trained with the drafter", "heads only"
# (row of the table, columns of metrics.jsonl, format)
ROWS = (
    ("confidence head, loss / Brier score", ("post_bce", "post_brier"), ".4f"),
    ("Fore-D head, loss / accepted-token error", ("pre_bce", "pre_token_error"), ".3f"),
)


def collect(folder: Path) -> pd.DataFrame:
    """Last held-out row of either way of training, as far as they are there."""
    frame = learning.read(folder, heads=True)
    held_out = frame[frame["split"] == "validation"]
    rows = []
    for name, last in held_out.groupby("drafter"):
        way = JOINT if name == "forespark" else HEADS if str(name).startswith("heads") else None
        if way is not None:
            rows.append({"way": way, **last.sort_values("step").iloc[-1].to_dict()})
    return pd.DataFrame(rows, columns=None if rows else ["way"])


def render(frame: pd.DataFrame) -> str:
    """Markdown; what is not measured is "n/a"."""
    by_way = {way: rows.iloc[-1] for way, rows in frame.groupby("way")}
    lines = [f"| | {JOINT} | {HEADS} |", "|---|---:|---:|"]
    costs = [_cost(by_way.get(way)) for way in (JOINT, HEADS)]
    lines.append(f"| cost | {' | '.join(costs)} |")
    for title, columns, form in ROWS:
        cells = [_values(by_way.get(way), columns, form) for way in (JOINT, HEADS)]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cost(row: Any) -> str:
    if row is None or pd.isna(row.get("elapsed_s")):
        return "n/a"
    return f"{row['elapsed_s'] / 3600:.1f} h, {int(row['step'])} steps"


def _values(row: Any, columns: tuple[str, ...], form: str) -> str:
    if row is None or any(pd.isna(row.get(column)) for column in columns):
        return "n/a"
    return " / ".join(f"{row[column]:{form}}" for column in columns)


def main() -> None:
    folder, out, _ = results.parse(__doc__, "train", "<drafter>/metrics.jsonl")
    frame = collect(folder)
    kept = ["way", "step", "elapsed_s", *(name for _, columns, _ in ROWS for name in columns)]
    write_text(out / "heads.csv", frame.reindex(columns=kept).to_csv(index=False))
    write_text(out / "heads.md", render(frame))
    print(out / "heads.csv", out / "heads.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
