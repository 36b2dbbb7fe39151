"""Reliability of both estimators: predicted against observed acceptance, by calibration.

    python plot/reliability.py --target smollm2
    python plot/reliability.py --records results/cpu/bench/predictor --out results/cpu/figures

Reads records.jsonl of ``eval.py --bench predictor``. One panel per estimator and set of
prompts, survival of all draft positions pooled; a dot's area grows with its drafts.
Writes reliability.pdf, reliability.png, reliability.csv (the bins) and reliability.md (the
expected calibration error).
"""

from __future__ import annotations

from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import predictor
import results
import style

from forespark.record import write_text

ESTIMATORS = {"pre": "pre-draft", "post": "post-draft"}
# calibration -> (label, colour, marker)
LOOKS = {
    "none": ("before calibration", "#999999", "s"),
    "served": ("calibrated", "#b3122a", "o"),
    "matched": ("calibrated on these prompts", "#e08a96", "^"),
}
DRAWN = ("none", "served")


def bins(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """prompts, estimator, calibration, drafts, predicted, observed; empty bins left out."""
    lines = [
        (row["prompts"], estimator, name, *entry)
        for row in rows
        for estimator, parts in row["reliability"].items()
        for name, part in parts.items()
        for entry in part["bins"]
        if entry[0]
    ]
    columns = ["prompts", "estimator", "calibration", "drafts", "predicted", "observed"]
    return pd.DataFrame(lines, columns=columns)


def draw(frame: pd.DataFrame, target: str) -> Any:
    """Reliability diagrams, the diagonal being perfect."""
    panels = list(dict.fromkeys(zip(frame["prompts"], frame["estimator"], strict=True)))
    width = style.PAGE_IN if len(panels) > 1 else style.COLUMN_IN
    fig, found = style.figure(width=width, height=2.3, columns=max(len(panels), 1))
    if not panels:
        style.empty(found, f"reliability of {target} not measured yet")
        return fig
    for axes, (prompts, estimator) in zip(found, panels, strict=True):
        mine = frame[(frame["prompts"] == prompts) & (frame["estimator"] == estimator)]
        axes.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=0.6)
        for name in DRAWN:
            rows = mine[mine["calibration"] == name]
            label, color, marker = LOOKS[name]
            axes.plot(rows["predicted"], rows["observed"], color=color, linewidth=0.8)
            size = 4 + 40 * (rows["drafts"] / rows["drafts"].sum()) ** 0.5
            axes.scatter(rows["predicted"], rows["observed"], s=size, color=color, marker=marker,
                         label=label, zorder=3, linewidths=0)  # fmt: skip
        axes.set_title(f"{ESTIMATORS[estimator]}, {prompts} prompts", fontsize=7)
        axes.set_xlabel("predicted survival")
    found[0].set_ylabel("observed share")
    found[0].legend(frameon=False, loc="upper left")
    return fig


def render(rows: list[dict[str, Any]]) -> str:
    """Markdown table of expected calibration errors, all positions pooled."""
    lines = [f"| prompts | estimator | {' | '.join(label for label, _, _ in LOOKS.values())} |",
             "|---|---|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        for estimator, label in ESTIMATORS.items():
            parts = row["reliability"][estimator]
            cells = [f"{100 * parts[name]['ece']:.2f} %" for name in LOOKS]
            lines.append(f"| {' | '.join([row['prompts'], label, *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    folder, out, target = results.parse(__doc__, "bench/predictor")
    rows = predictor.read(folder)
    frame = bins(rows)
    paths = style.save(draw(frame, target), out, "reliability")
    write_text(out / "reliability.csv", frame.to_csv(index=False))
    write_text(out / "reliability.md", render(rows))
    print(*paths, out / "reliability.csv", out / "reliability.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
