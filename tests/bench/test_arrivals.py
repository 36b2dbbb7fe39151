"""Arrivals: exact in count, the same for every arm, of the wanted mean rate."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from forespark.bench.arrivals import arrival_times, counts, read_trace
from forespark.record import append_jsonl

AZURE = Path(__file__).resolve().parents[3] / "shared/data/azure_llm_2023_conv.jsonl.gz"


def test_poisson_is_seeded_exact_and_of_its_rate():
    times = arrival_times("poisson", 5.0, 4001, 1)
    assert len(times) == 4001 and times[0] == 0.0 and times == sorted(times)
    assert times == arrival_times("poisson", 5.0, 4001, 1)
    assert times != arrival_times("poisson", 5.0, 4001, 2)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)  # exponential
    assert (gaps > 0.2).mean() == pytest.approx(np.exp(-1), abs=0.03)


def test_another_rate_only_stretches_them():
    slow, fast = (arrival_times("poisson", rate, 50, 0) for rate in (1.0, 4.0))
    assert np.allclose(np.array(slow), 4 * np.array(fast))


def test_a_trace_keeps_its_pattern(tmp_path):
    path = tmp_path / "trace.jsonl"
    for t in (0.0, 1.0, 1.5, 4.0, 4.1):
        append_jsonl(path, {"t_s": t, "input_tokens": 3})
    times = np.array(arrival_times(f"file:{path}", 2.0, 9, 0))
    gaps = np.diff(times)
    assert np.allclose(gaps[:4], gaps[4:])  # begins anew
    assert gaps[:4].mean() == pytest.approx(0.5)
    assert sorted(gaps[:4] / gaps[:4].sum()) == pytest.approx(
        sorted(np.array([1.0, 0.5, 2.5, 0.1]) / 4.1)
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: not JSON"),
        (['{"t": 1}'], "want an object with t_s"),
        (['{"t_s": true}'], "want an object with t_s"),
        (['{"t_s": NaN}'], "want an object with t_s"),
        (['{"t_s": 1}', '{"t_s": 1}'], "different times"),
        ([], "different times"),
    ],
)
def test_bad_traces(tmp_path, lines, message):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read_trace(str(path))
    with pytest.raises(ValueError, match="no such file"):
        read_trace(str(tmp_path / "absent"))


def test_compressed_trace(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(json.dumps({"t_s": t}) + "\n" for t in (3, 1, 2))
    assert read_trace(str(path)).tolist() == [1, 2, 3]


def test_counts_follow_the_rate():
    assert counts(4.0, 30, 120) == (120, 480)
    assert counts(0.01, 0, 20) == (0, 1)


@pytest.mark.skipif(not AZURE.exists(), reason="no recorded trace here")
def test_recorded_trace_of_a_real_service():
    times = arrival_times(f"file:{AZURE}", 10.0, 1001, 0)
    assert len(times) == 1001 and np.all(np.diff(times) >= 0)
    assert read_trace(str(AZURE)).size > 10_000
