"""Mean acceptance length of each drafter by set of prompts: bars, and a table.

    python plot/acceptance.py --target smollm2
    python plot/acceptance.py --records results/cpu/bench/acceptance --out results/cpu/figures

Reads records.jsonl of ``eval.py --bench acceptance``. A verification of K drafts yields
1 + K · accepted / verified tokens in the mean. Writes acceptance.pdf, acceptance.png,
acceptance.csv and acceptance.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before pandas)
import numpy as np
import pandas as pd
import results
import style

from forespark.record import read_jsonl, write_text

COUNTS = ("K", "requests", "tokens", "blocks", "accepted")


def read(folder: Path) -> pd.DataFrame:
    """One row per drafter and set, with ``length``; empty when not measured.

    Raises:
        ValueError: records of something else or damaged ones; names file, line and field.
    """
    path = folder / results.RECORDS
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        results.require(isinstance(row, dict), where, row, "one object a line")
        for name, want in (("schema", results.SCHEMA), ("bench", "acceptance")):
            results.require(row.get(name) == want, f"{where}: {name}", row.get(name), repr(want))
        for name in ("drafter", "set"):
            value = row.get(name)
            results.require(isinstance(value, str), f"{where}: {name}", value, "a name")
        for name in COUNTS:
            value = row.get(name)
            results.require(results.is_number(value), f"{where}: {name}", value, "a number")
        results.require(row["blocks"] > 0, f"{where}: blocks", row["blocks"], "some")
    frame = pd.DataFrame(rows, columns=["drafter", "set", *COUNTS])
    frame["length"] = 1 + frame["accepted"] / frame["blocks"]
    return frame


def means(frame: pd.DataFrame) -> pd.Series:
    """Mean over sets of every drafter, over the sets that all drafters have."""
    wide = frame.pivot(index="set", columns="drafter", values="length").dropna()
    return wide.mean()


def draw(frame: pd.DataFrame, target: str) -> Any:
    fig, axes = style.figure(width=style.PAGE_IN, height=2.4)
    if not len(frame):
        style.empty(axes, f"acceptance of {target} not measured yet")
        return fig
    sets = list(dict.fromkeys(frame["set"]))
    names = style.in_order(frame["drafter"])
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        rows = frame[frame["drafter"] == name].set_index("set")["length"].reindex(sets)
        look = style.look(name)
        offsets = np.arange(len(sets)) + (place - (len(names) - 1) / 2) * width
        axes.bar(offsets, rows, width, label=look.label, color=look.color,
                 hatch="" if place % 2 else "////", edgecolor="white", linewidth=0)  # fmt: skip
    axes.set_xticks(np.arange(len(sets)), sets, rotation=30 if len(sets) > 5 else 0)
    axes.set_ylabel("tokens per verified block")
    axes.set_ylim(bottom=1)
    axes.legend(frameon=False, ncols=len(names))
    return fig


def render(frame: pd.DataFrame) -> str:
    """Markdown: a row per set, a column per drafter, and the mean over common sets."""
    names = style.in_order(frame["drafter"])
    if not names:
        return "No acceptance records yet.\n"
    K = sorted(set(frame["K"]))
    lines = [f"| set | requests | {' | '.join(style.look(name).label for name in names)} |",
             "|---|---:|" + "---:|" * len(names)]  # fmt: skip
    for name, rows in frame.groupby("set", sort=False):
        by_drafter = rows.set_index("drafter")["length"]
        cells = [_shown(by_drafter.get(drafter)) for drafter in names]
        lines.append(f"| {name} | {rows['requests'].max()} | {' | '.join(cells)} |")
    mean = means(frame)
    lines.append(f"| mean | | {' | '.join(_shown(mean.get(name)) for name in names)} |")
    return "\n".join([*lines, "", f"K = {', '.join(map(str, K))}, at most K + 1."]) + "\n"


def _shown(value: Any) -> str:
    return "n/a" if value is None or pd.isna(value) else f"{value:.2f}"


def main() -> None:
    folder, out, target = results.parse(__doc__, "bench/acceptance")
    frame = read(folder)
    paths = style.save(draw(frame, target), out, "acceptance")
    write_text(out / "acceptance.csv", frame.to_csv(index=False))
    write_text(out / "acceptance.md", render(frame))
    print(*paths, out / "acceptance.csv", out / "acceptance.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
