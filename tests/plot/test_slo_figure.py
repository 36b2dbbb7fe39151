"""SLO figure and table from made-up records: complete, partial, none, damaged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forespark.bench.attainment import summarize_folder
from forespark.config import SloConfig
from forespark.record import append_jsonl, read_json, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plot"))

import claims
import slo

CAPACITY = {"ar": 5.0, "dspark": 4.0, "dflash2": 3.0, "forespark_nojs": 4.0, "forespark": 6.0}


def write(folder, arms=tuple(CAPACITY), rates=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)):
    """All attain until 0.9 of the capacity, none beyond 1.9 of it, linear between."""
    for arm in arms:
        for rate in rates:
            share = min(max(1.9 - rate / CAPACITY[arm], 0.0), 1.0)
            met = [i < round(100 * share) for i in range(100)]
            append_jsonl(folder / "records.jsonl", {
                "schema": 1, "bench": "slo", "run_id": "synthetic", "target": "smollm2",
                "arm": arm, "rate": rate, "round": 0, "arrivals": "poisson",
                "warmup_requests": 0, "prompt_ids": ["p"] * 100, "ends": ["stop"] * 100,
                "due_s": [0.0] * 100, "prompt_tokens": [9] * 100, "output_tokens": [9] * 100,
                "ttft_s": [0.5 if ok else 1.7 for ok in met], "tpot_s": [0.02] * 100,
                "wall_s": 1.0, "lag_s_p99": 0.0,
            })  # fmt: skip
    summarize_folder(folder, SloConfig())
    return folder


def test_table_claims_and_figure(tmp_path):
    summary = slo.read(write(tmp_path))
    text = slo.render(summary)
    assert "| AR | 5 [4." in text and "| ForeSpark | 6 [5." in text
    assert "| DSpark | 4 [3." in text and "| 1.50× [1." in text
    assert claims.capacity_over("dspark")(tmp_path).startswith("1.50× [1.")
    assert claims.capacity_over_strongest(tmp_path) == "1.20×"
    fig = slo.draw(summary, "smollm2")
    assert len(fig.axes) == 2 and len(fig.axes[0].get_lines()) == 6  # five arms and the level
    assert "at 5 requests/s" in fig.axes[1].get_xlabel()
    frame = slo.frame(summary)
    assert len(frame) == 5 * (7 + 10) and set(frame["panel"]) == {"rate", "scale"}


def test_partial_records_name_what_is_missing(tmp_path):
    summary = slo.read(write(tmp_path, arms=("ar", "forespark"), rates=(1.0, 2.0)))
    assert "above all measured" in slo.render(summary)
    fig = slo.draw(summary, "smollm2")
    assert "not measured: DFlash 2, DSpark, ForeSpark w/o JS" in fig.get_supxlabel()
    assert claims.capacity_over_strongest(tmp_path) is None
    assert claims.capacity_over("dspark")(tmp_path) is None


def test_nothing_measured(tmp_path):
    assert slo.read(tmp_path) is None
    assert "no slo records" in slo.draw(None, "smollm2").axes[0].texts[0].get_text()
    assert slo.render(None) == "No slo records yet.\n" and not len(slo.frame(None))


def test_other_or_damaged_summaries(tmp_path, capsys):
    write(tmp_path, arms=("ar",), rates=(1.0,))
    made = read_json(tmp_path / "summary.json")
    write_json(tmp_path / "summary.json", made | {"records_sha256": "other"})
    assert slo.read(tmp_path) is None and "other records" in capsys.readouterr().err
    write_json(tmp_path / "summary.json", {k: v for k, v in made.items() if k != "ratios"})
    with pytest.raises(ValueError, match="ratios: got None, want an object"):
        slo.read(tmp_path)
    (tmp_path / "summary.json").unlink()
    assert slo.read(tmp_path) is None and "again" in capsys.readouterr().err
