"""Training cost: time per iteration and drafter size, relative to plain DFlash 2.

    python plot/training_cost.py --target smollm2
    python plot/training_cost.py --records results/cpu/bench/training_cost --out results/cpu/figures

Reads records.jsonl and run.json of scripts/bench/training_cost.py. Writes
training_cost.pdf, training_cost.png, training_cost.csv and training_cost.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import read_json, read_jsonl, write_text

BENCH = "training_cost"
ARMS = ("dflash2", "forespark", "dspark")


def read(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Timings (arm, iteration, length, seconds) and run.json; empty when not measured.

    Raises:
        ValueError: records of something else, or damaged ones; names file and line.
    """
    path = folder / results.RECORDS
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        results.require(isinstance(row, dict), where, row, "one object a line")
        results.require(row.get("bench") == BENCH, f"{where}: bench", row.get("bench"), BENCH)
        seconds = row.get("seconds")
        results.require(results.is_number(seconds), f"{where}: seconds", seconds, "a number")
    columns = ["arm", "iteration", "length", "seconds"]
    run = read_json(folder / "run.json") if rows else {}
    return pd.DataFrame(rows, columns=columns), run


def summarize(frame: pd.DataFrame, run: dict[str, Any]) -> pd.DataFrame:
    """One row an arm: iterations, mean and median seconds, their ratios to DFlash 2, sizes.

    Only iterations that every arm has count, and only whole cycles of the pre-draft lengths.
    """
    if frame.empty:
        return pd.DataFrame(columns=["arm"])
    table = frame.pivot(index="iteration", columns="arm", values="seconds").dropna().sort_index()
    if len(table) >= run["K"]:
        table = table.iloc[: len(table) // run["K"] * run["K"]]
    lines = []
    for arm in (arm for arm in ARMS if arm in table):
        size = run["parameters"][arm]
        total = size["drafter"] + size["estimators"]
        lines.append({
            "arm": arm, "iterations": len(table), "mean_s": table[arm].mean(),
            "median_s": table[arm].median(),
            "mean_ratio": table[arm].mean() / table["dflash2"].mean(),
            # A disturbance hits one arm of one iteration; the median pair does not see it.
            "median_ratio": (table[arm] / table["dflash2"]).median(),
            "parameters": total, "estimator_share": size["estimators"] / total,
        })  # fmt: skip
    return pd.DataFrame(lines)


def draw(summary: pd.DataFrame, target: str) -> Any:
    """Bars of the time per iteration and of the size."""
    fig, (left, right) = style.figure(width=style.COLUMN_IN, height=2.2, columns=2)
    if summary.empty:
        for axes in (left, right):
            style.empty(axes, f"training cost of {target} not measured yet")
        return fig
    looks = [style.look(arm) for arm in summary["arm"]]
    names, colors = [look.label for look in looks], [look.color for look in looks]
    left.bar(names, summary["median_s"], color=colors)
    left.set_ylabel("median time per iteration (s)")
    right.bar(names, summary["parameters"] / 1e6, color=colors)
    right.set_ylabel("trained parameters (M)")
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=30)
    return fig


def render(summary: pd.DataFrame) -> str:
    """Markdown table."""
    lines = ["| drafter | iterations | time per iteration, mean (median) | of DFlash 2, mean "
             "(median of pairs) | parameters | estimators' share |",
             "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in summary.to_dict("records"):
        cells = [
            style.look(row["arm"]).label,
            str(row["iterations"]),
            f"{row['mean_s']:.2f} s ({row['median_s']:.2f} s)",
            f"{row['mean_ratio']:.3f} ({row['median_ratio']:.3f})",
            f"{row['parameters'] / 1e6:.2f} M",
            f"{100 * row['estimator_share']:.2f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    folder, out, target = results.parse(__doc__, f"bench/{BENCH}")
    summary = summarize(*read(folder))
    paths = style.save(draw(summary, target), out, BENCH)
    write_text(out / f"{BENCH}.csv", summary.to_csv(index=False))
    write_text(out / f"{BENCH}.md", render(summary))
    print(*paths, out / f"{BENCH}.csv", out / f"{BENCH}.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
