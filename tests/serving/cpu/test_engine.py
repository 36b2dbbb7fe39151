"""The V2 runner with twins against the V1 runner, and hidden states for online training."""

from __future__ import annotations

import json
from pathlib import Path

import nursery
import pytest

MODEL = Path(__file__).resolve().parents[3] / "models" / "smollm2"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="run setup.sh first"),
]


def run(runner: str, folder: Path) -> dict:
    out = folder / f"{runner}.json"
    child = Path(__file__).with_name("engine_child.py")
    nursery.run(child, [MODEL, out, runner], folder / f"{runner}.log")
    return json.loads(out.read_text())


def test_v2_answers_as_v1(tmp_path):
    old, new = run("1", tmp_path), run("2", tmp_path)
    assert new["plain"] == old["plain"]
    assert new["fancy"] == old["fancy"]
    for name in ("logprobs", "prompt_logprobs"):
        for before, after in zip(old[name], new[name], strict=True):
            assert after == pytest.approx(before, abs=1e-3)


def test_hidden_states_of_a_long_prompt(tmp_path):
    found = run("hidden", tmp_path)
    assert found == {"hidden_states": [400, 6, 576], "finite": True, "token_ids": True}
