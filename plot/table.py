"""Markdown table of arms at loads: throughput, and ratios to AR and to DSpark.

    python plot/table.py --target smollm2 [--bench e2e] > table.md

Ratios are at equal load, with a 95 % interval from resampled rounds in brackets; below
the table, the largest ratio at equal interactivity and how many outputs equal AR's.
"""

from __future__ import annotations

from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import write_text

BASES = ("ar", "dspark")


def render(points: pd.DataFrame, summary: dict[str, Any] | None, target: str, bench: str) -> str:
    """Markdown text; what is not measured is "n/a"."""
    if not len(points):
        return f"No {bench} records of {target} yet.\n"
    pairs = {(p["arm"], p["base"]): p for p in summary["pairs"]} if summary else {}
    head = ["load", "arm", "throughput (tokens/s)", "interactivity (tokens/s)",
            "tokens per step", "drafted / verified / accepted per token",
            *(f"× {style.look(base).label}" for base in BASES)]  # fmt: skip
    lines = [_row(head), _row(["---:", "---", *["---:"] * (len(head) - 2)])]
    for load, group in points.groupby("load", sort=True):
        by_arm = group.set_index("arm")
        for arm in style.in_order(by_arm.index):
            point = by_arm.loc[arm]
            lines.append(
                _row(
                    [
                        str(load),
                        style.look(arm).label,
                        f"{point['throughput']:.1f}",
                        f"{point['interactivity']:.2f}",
                        _number(point["tokens"] / point["request_steps"]),
                        _per_token(point),
                        *(_ratio(pairs, arm, base, str(load)) for base in BASES),
                    ]
                )
            )
    missing = [style.look(arm).label for arm in style.ARMS if arm not in set(points["arm"])]
    notes = [f"Not measured: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, "", *notes, *_best(pairs), *_same(summary)]).rstrip() + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return "n/a" if pd.isna(value) else f"{value:.2f}"


def _per_token(point: pd.Series) -> str:
    counts = [point[f"{name}_tokens"] for name in ("drafted", "verified", "accepted")]
    if any(pd.isna(count) for count in counts):
        return "n/a"
    return " / ".join(f"{count / point['tokens']:.2f}" for count in counts)


def _interval(values: list[float] | None) -> str:
    return f" [{values[0]:.2f}, {values[1]:.2f}]" if values else ""


def _ratio(pairs: dict[tuple[str, str], Any], arm: str, base: str, load: str) -> str:
    if arm == base:
        return "1"
    found = pairs.get((arm, base), {}).get("loads", {}).get(load)
    if found is None:
        return "n/a"
    return f"{found['throughput_ratio']:.2f}{_interval(found['throughput_interval'])}"


def _best(pairs: dict[tuple[str, str], Any]) -> list[str]:
    """Largest ratio at matched interactivity, for ForeSpark against every other arm."""
    lines = []
    for (arm, base), pair in pairs.items():
        if arm != "forespark":
            continue
        best, name = pair["best"], style.look(base).label
        if best is None:
            lines.append(f"- ForeSpark against {name} at equal interactivity: n/a (no overlap)")
        else:
            at = best["interactivity_tokens_per_s"]
            lines.append(
                f"- ForeSpark against {name} at equal interactivity: at most "
                f"{best['ratio']:.2f}×{_interval(best['interval'])}, at {at:.2f} tokens/s per user"
            )
    return lines


def _same(summary: dict[str, Any] | None) -> list[str]:
    counts = (summary or {}).get("same_outputs_as_ar", {})
    return [
        f"- {style.look(arm).label}: {c['same']} of {c['requests']} outputs equal AR's"
        for arm in style.in_order(counts)
        for c in [counts[arm]]
    ]


def main() -> None:
    folder, out, target = results.parse(__doc__, benches=results.LOADED)
    frame = results.read(folder)
    stem, bench = results.named("table", folder, frame)
    text = render(results.points(frame), results.summary(folder), target, bench)
    write_text(out / f"{stem}.md", text)
    print(text, end="")


if __name__ == "__main__":
    results.run(main)
