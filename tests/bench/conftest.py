"""Shared by the tests of the benchmarks: a small decode run on a mock engine."""

from __future__ import annotations

import json

import pytest

from forespark.bench import steptrace
from forespark.config import load
from forespark.record import append_jsonl


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(steptrace, "_SETTLE_S", 0.0)  # the mock writes no trace
    prompts = tmp_path / "prompts.jsonl"
    for i in range(6):
        append_jsonl(prompts, {"prompt": f"tell me about number {i}"})
    append_jsonl(prompts, {"prompt": json.dumps({"chunks": [[0, 1], [0, 1]], "finish": "stop"})})
    append_jsonl(prompts, {"prompt": json.dumps({"fail": "http"})})
    return load(
        [
            "target=smollm2",
            f"bench.prompts=['file:{prompts}']",
            "bench.loads=[1,2]",
            "bench.arms=[ar]",
            "bench.output_tokens=8",
            "bench.min_answer_tokens=9",
            "bench.rounds=2",
            "bench.requests_per_point=0",
            "bench.warmup_tokens=1",
            f"run_dir='{tmp_path / 'run'}'",
        ]
    )
