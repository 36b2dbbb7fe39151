"""Accepted-count change between consecutive steps, and length dependence of drafts (Figure 3).

    python plot/motivation.py --target smollm2
    python plot/motivation.py --records results/cpu/bench/motivation --out results/cpu/figures

Reads records.jsonl of `eval.py --bench motivation`. Writes motivation.pdf, motivation.png,
motivation.csv and motivation.md.
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

BENCH = "motivation"


def read(folder: Path) -> list[dict[str, Any]]:
    """One row per answer, checked; [] when not measured.

    Raises:
        ValueError: records of something else, or damaged ones; names file and line.
    """
    path = folder / results.RECORDS
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        results.require(isinstance(row, dict), where, row, "one object a line")
        results.require(row.get("bench") == BENCH, f"{where}: bench", row.get("bench"), BENCH)
        accepted, differs = row.get("accepted"), row.get("differs")
        whole = isinstance(accepted, list) and all(map(results.is_number, accepted))
        results.require(whole, f"{where}: accepted", accepted, "a list of numbers")
        same = isinstance(differs, list) and len(differs) == len(accepted)
        results.require(same, f"{where}: differs", differs, "one list per accepted count")
    return rows


def changes(rows: list[dict[str, Any]]) -> np.ndarray:
    """|accepted now - accepted one step earlier| of all consecutive steps."""
    parts = [np.abs(np.diff(row["accepted"])) for row in rows]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """kind (change | differs), value (tokens of change, or d), share of steps or drafts."""
    lines: list[tuple[str, int, float]] = []
    if rows:
        moved = changes(rows)
        lines += [("change", n, float((moved == n).mean())) for n in range(int(moved.max()) + 1)]
        differs = np.array([entry for row in rows for entry in row["differs"]])
        lines += [("differs", d + 1, float(share)) for d, share in enumerate(differs.mean(axis=0))]
    return pd.DataFrame(lines, columns=["kind", "value", "share"])


def draw(frame: pd.DataFrame, target: str) -> Any:
    fig, panels = style.figure(width=style.PAGE_IN, height=2.2, columns=2)
    names = (("change", "|change in accepted count| (tokens)", "share of steps (%)"),
             ("differs", "draft length d", "d-token drafts that differ (%)"))  # fmt: skip
    for axes, (kind, across, up) in zip(panels, names, strict=True):
        rows = frame[frame["kind"] == kind]
        if not len(rows):
            style.empty(axes, f"motivation of {target} not measured yet")
            continue
        axes.bar(rows["value"], 100 * rows["share"], color=style.look("dflash2").color,
                 edgecolor="#111111", linewidth=0.4)  # fmt: skip
        axes.set_xticks(rows["value"])
        axes.set_xlabel(across)
        axes.set_ylabel(up)
    return fig


def render(rows: list[dict[str, Any]]) -> str:
    """Markdown: the three shares the paper names."""
    if not rows:
        return "No motivation records yet.\n"
    moved, frame = changes(rows), table(rows)
    differs = frame[frame["kind"] == "differs"]["share"]
    span = f"{100 * differs.min():.0f} to {100 * differs.max():.0f} %" if len(differs) else "n/a"
    return "\n".join([
        f"Steps of full-block drafting: {sum(len(row['accepted']) for row in rows)}.", "",
        f"- The accepted count changes from one step to the next in {100 * (moved > 0).mean():.0f} "
        f"% of cases, by three tokens or more in {100 * (moved >= 3).mean():.0f} %.",
        f"- Of d-token drafts, {span} differ from the full draft's first d tokens.", "",
    ])  # fmt: skip


def main() -> None:
    folder, out, target = results.parse(__doc__, f"bench/{BENCH}")
    rows = read(folder)
    frame = table(rows)
    paths = style.save(draw(frame, target), out, BENCH)
    write_text(out / f"{BENCH}.csv", frame.to_csv(index=False))
    write_text(out / f"{BENCH}.md", render(rows))
    print(*paths, out / f"{BENCH}.csv", out / f"{BENCH}.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
