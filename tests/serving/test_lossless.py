"""Greedy answers of every arm equal AR's on real prompts, with the shipped drafters.

Float32 sums depend on how many tokens share a matrix product, so two tokens whose logits
nearly tie may swap. Any difference must be shown to be such a tie, by the target's own
logits at the first differing position. ``FULL=1`` asks for 64 tokens of each answer.
"""

from __future__ import annotations

import json
import os

import prices
import pytest
import serve_child

pytestmark = pytest.mark.engine
ROOT = serve_child.ROOT
DATA = ROOT.parent / "shared" / "data" / "mt_bench.jsonl"
SHIPPED = [ROOT / "models" / f"smollm2-{name}" for name in ("forespark", "dspark")]
TIE = 1e-3  # logits
TOKENS = 64 if os.environ.get("FULL") == "1" else 24
ARMS = ["dflash2", "dspark", "forespark_nojs", "forespark"]

needs = pytest.mark.skipif(
    not DATA.exists() or not all((path / "model.safetensors").exists() for path in SHIPPED),
    reason="needs the shared prompts and the shipped drafters",
)


def prompts() -> list[str]:
    """The 64 shortest of 80: prefill is most of the work, and not what is compared."""
    return sorted((json.loads(line)["turns"][0] for line in DATA.open()), key=len)[:64]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless")

    def serve(arm: str):
        tables = [f"run_dir={folder}"] if arm != "ar" else []
        if arm.startswith("forespark") and not (folder / "latency.json").exists():
            prices.write(folder)
        job = {
            "overrides": [
                "target=smollm2",
                f"arm={arm}",
                "target.cpu_kv_cache_gib=1",
                "target.max_num_batched_tokens=1024",
                *tables,
            ],
            "requests": [{"chat": text, "max_tokens": TOKENS} for text in prompts()],
            "load": 16,
        }
        return serve_child.serve(folder, arm, job)

    return serve


@pytest.fixture(scope="module")
def reference(run):
    return run("ar")


@needs
@pytest.mark.parametrize("arm", ARMS)
def test_greedy_equals_ar(run, reference, arm):
    result = run(arm)
    assert sum(row["accepted"] for row in result["steps"]) > TOKENS
    pairs = zip(reference["prompts"], reference["answers"], result["answers"], strict=True)
    different = [(p, a, b) for p, a, b in pairs if a != b]
    gaps = [gap_at_first_difference(*case) for case in different]
    assert all(gap < TIE for gap in gaps), gaps
    assert len(different) <= 6, "near-ties are rare; this many differences are a fault"


def gap_at_first_difference(prompt, expected, found) -> float:
    """Logit gap between the two tokens where the answers part."""
    import torch
    from transformers import AutoModelForCausalLM

    at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "smollm2", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
    top = logits.topk(2)
    assert {expected[at], found[at]} == set(top.indices.tolist()), "not the target's top two"
    return float(top.values[0] - top.values[1])
