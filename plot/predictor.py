"""Predictor quality: share of drafts within a given error of the predicted acceptance.

    python plot/predictor.py --target smollm2
    python plot/predictor.py --records results/cpu/bench/predictor --out results/cpu/figures

Reads records.jsonl of ``eval.py --bench predictor``, one panel per set of prompts. Writes
predictor.pdf, predictor.png, predictor.csv (the curves) and predictor.md (the table).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import read_jsonl, write_text

# predictor -> (label, colour, line); the first two are the figure's subject.
LOOKS: dict[str, tuple[str, str, Any]] = {
    "served": ("pre-draft estimate", "#b3122a", "-"),
    "previous": ("previous step", "#3f8fc4", (0, (4, 2))),
    "mean": ("mean of all drafts", "#999999", (0, (1, 1.2))),
    "constant": ("median of all drafts", "#bbbbbb", (0, (1, 1.2))),
    "median": ("estimate, its median", "#7a0c1d", (0, (2, 1))),
    "matched": ("estimate, calibrated on these prompts", "#e08a96", (0, (3, 1))),
    "none": ("estimate, not calibrated", "#c9b4b8", (0, (5, 1.5, 1, 1.5))),
    "after": ("post-draft estimate", "#111111", (0, (1, 2))),
}
DRAWN = ("served", "previous", "mean", "after")


def read(folder: Path) -> list[dict[str, Any]]:
    """Records of the benchmark, checked; none when it has not been run.

    Raises:
        ValueError: another schema, or a part that is missing; names file, line and field.
    """
    path = folder / results.RECORDS
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        results.require(isinstance(row, dict), where, row, "one object a line")
        for name, want in (("schema", results.SCHEMA), ("bench", "predictor")):
            results.require(row.get(name) == want, f"{where}: {name}", row.get(name), repr(want))
        for name in ("prompts", "errors", "predictors", "mae_ratio", "pairs", "reliability"):
            results.require(name in row, f"{where}: {name}", None, "a value")
    return rows


def curves(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """prompts, predictor, error (tokens), share of drafts within it."""
    lines = [
        (row["prompts"], name, error, share)
        for row in rows
        for name, judged in row["predictors"].items()
        for error, share in zip(row["errors"], judged["within"], strict=True)
    ]
    return pd.DataFrame(lines, columns=["prompts", "predictor", "error", "share"])


def draw(frame: pd.DataFrame, target: str) -> Any:
    """Error curves, one panel per set of prompts."""
    sets = list(dict.fromkeys(frame["prompts"])) or [""]
    fig, panels = style.figure(
        width=style.COLUMN_IN * min(len(sets), 2), height=2.5, columns=len(sets)
    )
    for axes, prompts in zip([panels] if len(sets) == 1 else panels, sets, strict=True):
        if frame.empty:
            style.empty(axes, f"predictor of {target} not measured yet")
            continue
        for name in DRAWN:
            rows = frame[(frame["prompts"] == prompts) & (frame["predictor"] == name)]
            label, color, line = LOOKS[name]
            axes.plot(rows["error"], 100 * rows["share"], label=label, color=color, linestyle=line,
                      drawstyle="steps-post")  # fmt: skip
        axes.set_xlabel("error of the accepted count, at most (tokens)")
        axes.set_ylabel("share of drafts (%)")
        axes.set_title(f"{prompts} prompts", fontsize=8)
        axes.grid(True, linewidth=0.3, color="#dddddd")
    if not frame.empty:
        axes.legend(frameon=False, loc="lower right")
    return fig


def render(rows: list[dict[str, Any]]) -> str:
    """Markdown table: every predictor on every set of prompts."""
    lines = ["| prompts | drafts | predictor | within one token | mean absolute error | "
             "of the previous step's |", "|---|---:|---|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        for name in (name for name in LOOKS if name in row["predictors"]):
            judged, ratio = row["predictors"][name], row["mae_ratio"].get(name)
            shown = "" if name == "previous" else "n/a"
            if ratio and ratio["ratio"] is not None:
                shown = f"{ratio['ratio']:.3f}"
            if ratio and ratio["interval"] is not None:
                shown += " ({:.3f} to {:.3f})".format(*ratio["interval"])
            numbers = [f"{100 * judged['within_one']:.1f} %", f"{judged['mae']:.3f}", shown]
            cells = [row["prompts"], str(row["pairs"]), LOOKS[name][0], *numbers]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    folder, out, target = results.parse(__doc__, "bench/predictor")
    rows = read(folder)
    frame = curves(rows)
    paths = style.save(draw(frame, target), out, "predictor")
    write_text(out / "predictor.csv", frame.to_csv(index=False))
    write_text(out / "predictor.md", render(rows))
    print(*paths, out / "predictor.csv", out / "predictor.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
