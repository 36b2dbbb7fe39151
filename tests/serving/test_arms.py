"""The real engine on a tiny model: every arm is lossless, and pays for what it drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import serve_child
import tiny

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder


PROMPTS = [[5, 7, 9, 3], *([3 + i % 9, 5, 3 + (7 * i) % 9] * (1 + i % 4) for i in range(31))]


def serve(folder, arm, *overrides, temperature=0.0, count=24, tokens=24):
    """Answers and steps of one arm; sampled requests share a prompt, each with its seed."""
    requests = [
        {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": tokens, "ignore_eos": True}
        if temperature == 0
        else {
            "prompt": PROMPTS[0],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": temperature,
            "seed": i,
        }
        for i in range(count)
    ]
    job = {
        "overrides": ["target=smollm2", f"arm={arm}", *tiny.overrides_for(folder, arm), *overrides],
        "requests": requests,
        "load": 16,
        "engine": {"skip_tokenizer_init": True},
    }
    return serve_child.serve(folder, arm, job)


@pytest.fixture(scope="module")
def greedy(folder):
    return serve(folder, "ar")["answers"]


def check_steps(steps):
    """What holds in every step of our arms, whatever the schedule."""
    decode = [row for row in steps if row["n"] > 0]
    assert decode
    for before, row in zip(steps, steps[1:], strict=False):
        assert row["B"] <= row["scheduled"] <= before["drafted"], "verified more than was drafted"
        assert row["accepted"] <= row["B"]
        # A drafted request costs its drafts and one anchor, an undrafted one nothing.
        assert row["drafted"] <= row["drafter_tokens"] <= row["drafted"] + row["n"]
        assert (row["drafter_tokens"] == 0) == (row["drafted"] == 0)


@pytest.mark.parametrize("arm", ["dflash2", "dspark", "forespark_nojs", "forespark"])
def test_greedy_output_is_the_targets(folder, greedy, arm):
    result = serve(folder, arm)
    assert result["answers"] == greedy
    accepted = sum(row["accepted"] for row in result["steps"])
    assert accepted > 0, "no draft was accepted: the test shows nothing"
    if arm.startswith("forespark"):
        check_steps(result["steps"])


def test_host_split_drafts_and_answers_the_same(folder, greedy):
    """Ranking on the host (sparse-MLA targets) gives the same lengths and answers."""
    device, host = (serve(folder, "forespark", f"serve.split={how}") for how in ("device", "host"))
    assert host["answers"] == device["answers"] == greedy
    fields = ("n", "B", "drafted", "drafter_tokens", "accepted")
    lengths = [[[row[name] for name in fields] for row in r["steps"]] for r in (device, host)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("length", [1, 3])
def test_forced_length_is_what_is_drafted_and_verified(folder, greedy, length):
    result = serve(folder, "forespark", f"serve.force_length={length}")
    assert result["answers"] == greedy
    steps = result["steps"]
    for before, row in zip(steps, steps[1:], strict=False):
        if row["prefill"] == 0 and row["n"] == 16 and before["n"] == 16:
            assert row["B"] == 16 * length
            assert before["drafter_tokens"] == 16 * (length + 1)


def test_chunked_prefill_and_preemption_stay_lossless(folder):
    """Prompts cut over steps beside verification, and more requests than fit at once."""
    small = ("target.max_num_batched_tokens=32", "target.max_num_seqs=4")
    expected = serve(folder, "ar", *small, count=12, tokens=30)["answers"]
    table = folder / "latency.json"
    content = json.loads(table.read_text())
    content["key"]["max_num_seqs"] = 4
    other = folder / "small"
    other.mkdir(exist_ok=True)
    (other / "latency.json").write_text(json.dumps(content))
    (other / "calibration.json").write_text((folder / "calibration.json").read_text())
    result = serve(folder, "forespark", *small, f"run_dir={other}", count=12, tokens=30)
    assert result["answers"] == expected


@pytest.mark.parametrize("force", ["null", "2"])
def test_sampled_output_keeps_the_targets_distribution(folder, force):
    """Chi-square of the first two tokens against exact enumeration, temperature 1.

    Planned lengths, and two drafts forced on every request so that most tokens went
    through rejection sampling.
    """
    import torch
    from scipy.stats import chi2
    from transformers import LlamaForCausalLM

    count = 3000
    result = serve(
        folder, "forespark", f"serve.force_length={force}", temperature=1.0, count=count, tokens=3
    )
    accepted = sum(row["accepted"] for row in result["steps"])
    assert accepted > (count / 3 if force == "2" else 0)
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    prompt = PROMPTS[0]
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1).double()
        second = model(torch.tensor([[*prompt, t] for t in range(tiny.VOCAB)]))
        second = second.logits[:, -1].softmax(-1).double()
    expected = count * (first[:, None] * second).flatten().numpy()
    seen = np.zeros(tiny.VOCAB**2)
    for answer in result["answers"]:
        seen[answer[0] * tiny.VOCAB + answer[1]] += 1
    # Cells too rare for the test are pooled into one.
    rare = expected < 8
    expected = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(seen[~rare], seen[rare].sum())
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(0.9999, len(expected) - 1), (statistic, len(expected))
