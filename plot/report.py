"""Every headline claim of the paper beside ours: report.md and report.html.

    python plot/report.py --target smollm2
    python plot/report.py --records results/cpu --out results/cpu/figures

Reads a folder laid out like runs/TARGET. Ours is computed from the records when the report
is written; it links to them and names the command that made them. A claim without records
is "not run". The claims are in plot/claims.py.
"""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path

import environment  # noqa: F401  (before pandas)
import results
from claims import CLAIMS, Claim

from forespark.record import read_json, write_text

NOT_RUN = "not run"
HEADS = ("topic", "claim", "paper", "ours", "status", "command", "paper's section")


@dataclass(frozen=True, slots=True)
class Line:
    """One claim as it stands with these records."""

    claim: Claim
    ours: str | None
    status: str  # measured on CPU | measured on GPU | not run
    link: str | None  # path of the records from the report

    def cells(self) -> tuple[str, ...]:
        """Values under HEADS, as plain text."""
        c = self.claim
        return (c.topic, c.text, c.paper, self.ours or "n/a", self.status, c.command, c.where)


def status(folder: Path) -> str:
    """Where the records of ``folder`` were measured, by their provenance.

    Raises:
        ValueError: run.json names no device; says which.
    """
    runs = read_json(folder / "run.json")
    entries = runs.get("runs", [runs]) if isinstance(runs, dict) else []
    devices = {str(entry.get("provenance", {}).get("device")) for entry in entries}
    kinds = {"CPU" if device.startswith("cpu") else "GPU" for device in devices}
    if not devices or "None" in devices:
        raise ValueError(f"{folder / 'run.json'}: runs without a device in their provenance")
    return f"measured on {' and '.join(sorted(kinds))}"


def lines(records: Path, out: Path) -> list[Line]:
    """Every claim with the value that ``records`` gives it."""
    found = []
    for claim in CLAIMS:
        folder = records / claim.bench
        there = claim.ours is not None and (folder / results.RECORDS).exists()
        ours = claim.ours(folder) if there and claim.ours is not None else None
        link = os.path.relpath(folder / results.RECORDS, out) if ours is not None else None
        found.append(Line(claim, ours, status(folder) if ours is not None else NOT_RUN, link))
    return found


def setting(records: Path, target: str) -> str:
    """What ours was measured on, in a sentence."""
    path = records / "bench/decode/run.json"
    if not path.exists():
        return f"Ours: target {target}; the decode benchmark has not been run."
    runs = read_json(path)
    device = runs["runs"][-1]["provenance"]["device"]
    return f"Ours: target {target}, K = {runs['fixed']['K']}, {device}."


def markdown(found: list[Line], intro: str) -> str:
    rows = [f"| {' | '.join(HEADS)} |", "|---|---|---:|---:|---|---|---|"]
    for line in found:
        topic, text, paper, ours, state, command, where = line.cells()
        ours = f"[{ours}]({line.link})" if line.link else ours
        command = f"`{command}`" if line.claim.bench else command
        rows.append(f"| {' | '.join((topic, text, paper, ours, state, command, where))} |")
    return "\n".join(["# Claims of the paper, and ours", "", intro, "", *rows]) + "\n"


def page(found: list[Line], intro: str) -> str:
    """The same as a page that needs nothing else."""
    rows = [f"<tr>{''.join(f'<th>{html.escape(head)}</th>' for head in HEADS)}</tr>"]
    for line in found:
        cells = [html.escape(cell) for cell in line.cells()]
        if line.link:
            cells[3] = f'<a href="{html.escape(line.link)}">{cells[3]}</a>'
        if line.claim.bench:
            cells[5] = f"<code>{cells[5]}</code>"
        kind = ' class="none"' if line.ours is None else ""
        rows.append(f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    style = ("body{font:14px sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse}"
             "td,th{border-bottom:1px solid #ddd;padding:.3em .6em;text-align:left}"
             ".none{color:#888}")  # fmt: skip
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>Claims of the paper, and ours</title><style>{style}</style></head><body>",
        f"<h1>Claims of the paper, and ours</h1><p>{html.escape(intro)}</p><table>", *rows,
        "</table></body></html>", "",
    ])  # fmt: skip


def main() -> None:
    records, out, target = results.parse(__doc__, ".", "bench/*/records.jsonl")
    found, intro = lines(records, out), setting(records, target)
    write_text(out / "report.md", markdown(found, intro))
    write_text(out / "report.html", page(found, intro))
    measured = sum(line.ours is not None for line in found)
    print(f"{measured} of {len(found)} claims have records", out / "report.md",
          out / "report.html", sep="\n")  # fmt: skip


if __name__ == "__main__":
    results.run(main)
