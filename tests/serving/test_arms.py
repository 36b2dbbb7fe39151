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


def run_job(folder, arm, requests, *overrides, load=16, **engine):
    """Answers and steps of one arm on the tiny target."""
    job = {
        "overrides": ["target=smollm2", f"arm={arm}", *tiny.overrides_for(folder, arm), *overrides],
        "requests": requests,
        "load": load,
        "engine": {"skip_tokenizer_init": True, **engine},
    }
    return serve_child.serve(folder, arm, job)


def serve(folder, arm, *overrides, temperature=0.0, count=24, tokens=24):
    """As ``run_job``; sampled requests share a prompt, each with its own seed."""
    common = {"max_tokens": tokens, "ignore_eos": True}
    if temperature == 0:
        requests = [{"prompt": PROMPTS[i % len(PROMPTS)], **common} for i in range(count)]
    else:
        hot = {"prompt": PROMPTS[0], "temperature": temperature, **common}
        requests = [{**hot, "seed": i} for i in range(count)]
    return run_job(folder, arm, requests, *overrides)


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


@pytest.mark.parametrize(
    "arm", ["dflash2", "dspark", "forespark_nojs", "forespark", "exhaustive", "dspark_wcs"]
)
def test_greedy_output_is_the_targets(folder, greedy, arm):
    result = serve(folder, arm)
    assert result["answers"] == greedy
    accepted = sum(row["accepted"] for row in result["steps"])
    assert accepted > 0, "no draft was accepted: the test shows nothing"
    if arm not in ("dflash2", "dspark"):
        check_steps(result["steps"])


@pytest.mark.parametrize("arm", ["bw", "bw_stock"])
def test_batch_wise_caps_follow_the_load(folder, greedy, arm):
    """Caps of 3, 2, 0 and 1 for up to 1, 4, 11 and 16 requests; the batch drains at the end."""
    table = [[1.0 + (k == cap) for k in range(tiny.K + 1)] for cap in (3, 2, 0, 1)]
    section = {"loads": [1, 3, 8, 16], "caps": [3, 2, 0, 1], "throughput": table}
    key = json.loads((folder / "latency.json").read_text())["key"]
    content = {"schema": 1, "key": key, "bw": section, "bw_stock": section}
    (folder / "caps.json").write_text(json.dumps(content))
    result = serve(folder, arm)
    assert result["answers"] == greedy
    assert sum(row["accepted"] for row in result["steps"]) > 0
    caps = [0, 3, 2, 2, 2, *[0] * 7, *[1] * 5]
    seen = set()
    for before, row in zip(result["steps"], result["steps"][1:], strict=False):
        cap = caps[before["batch"]]
        if arm == "bw":
            assert before["drafted"] == before["n"] * cap
        if row["n"] == before["n"] == before["batch"] == row["batch"]:
            assert row["B"] == row["n"] * cap
            seen.add(cap)
    assert {0, 1} <= seen, seen


def test_host_split_drafts_and_answers_the_same(folder, greedy):
    """Ranking on the host (sparse-MLA targets) gives the same lengths and answers."""
    device, host = (serve(folder, "forespark", f"serve.split={how}") for how in ("device", "host"))
    assert host["answers"] == device["answers"] == greedy
    fields = ("n", "B", "drafted", "drafter_tokens", "accepted")
    lengths = [[[row[name] for name in fields] for row in r["steps"]] for r in (device, host)]
    assert lengths[0] == lengths[1]


def test_a_running_refit_changes_lengths_and_no_answer(folder, greedy):
    still, moving = (serve(folder, "forespark", f"serve.recalibrate={n}") for n in (0, 50))
    assert moving["answers"] == greedy
    check_steps(moving["steps"])
    drafted = [[row["drafted"] for row in result["steps"]] for result in (still, moving)]
    assert drafted[0] != drafted[1]


def test_forced_length_is_what_is_drafted_and_verified(folder, greedy):
    length = 1
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


def test_greedy_and_sampled_requests_share_a_batch(folder, greedy):
    """Half the batch at temperature 1, drafting from the drafter's own distribution."""
    requests = [
        {"prompt": t, "max_tokens": 24, "ignore_eos": True}
        | ({"temperature": 1.0, "seed": i} if i % 2 else {})
        for i, t in enumerate(PROMPTS[:24])
    ]
    result = run_job(folder, "forespark", requests)
    assert result["answers"][::2] == greedy[::2]
    assert result["answers"][1::2] != greedy[1::2]


def test_answers_up_to_the_context_limit(folder):
    """Fewer than K positions left before max_model_len, for every request."""
    requests = [{"prompt": t, "max_tokens": 500, "ignore_eos": True} for t in PROMPTS[:6]]
    expected = run_job(folder, "ar", requests)["answers"]
    assert all(len(p) + len(a) == 128 for p, a in zip(PROMPTS, expected, strict=False))
    assert run_job(folder, "forespark", requests)["answers"] == expected


def test_cached_prompts_draft_as_fresh_ones(folder):
    """The same prompts twice with the prefix cache on: same answers, same acceptance."""
    prompts = [[3 + (i + k * k) % 9 for k in range(70)] for i in range(4)]
    requests = [{"prompt": t, "max_tokens": 24, "ignore_eos": True} for t in prompts * 2]
    length = ["serve.force_length=3", "serve.trace_detail=true"]
    cache = {"enable_prefix_caching": True, "block_size": 32}
    result = run_job(folder, "forespark", requests, *length, load=4, **cache)
    assert result["answers"][:4] == result["answers"][4:]
    prefill = [row["prefill"] for row in result["steps"] if row["prefill"]]
    assert sum(prefill) < 2 * 4 * 70, "the second round hit no cache"
    graded = [entry for row in result["steps"] for entry in row.get("requests", [])]
    rounds: list[list[tuple]] = [[], []]
    for entry in graded:
        index = int(entry["id"].split("-")[0][1:])
        rounds[index // 4].append((index % 4, entry["pos"], entry["a"]))
    assert sorted(rounds[0]) == sorted(rounds[1])


def test_broken_heads_draft_nothing_and_stay_lossless(folder, greedy, tmp_path):
    """NaN estimates: survival 0, no drafts, a trace that can be written."""
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "drafter"
    shutil.copytree(folder / "forespark", copy)
    heads = copy / "forespark" / "heads.safetensors"
    weights = load_file(heads)
    weights["pre.b_o"][:] = float("nan")
    save_file(weights, heads)
    trace = tmp_path / "trace.jsonl"
    overrides = [f"drafter.dir={copy}", f"serve.trace={trace}", "serve.trace_detail=true"]
    result = serve(folder, "forespark", *overrides)
    assert result["answers"] == greedy
    assert sum(row["drafted"] for row in result["steps"]) == 0
    assert result["steps"][-1]["bad_estimates"] > 0
    forced = serve(folder, "forespark", *overrides, "serve.force_length=2")
    assert forced["answers"] == greedy
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    traced = [e for line in lines for e in line.get("requests", [])]
    assert traced and all(entry["z"] == [None, None] for entry in traced)
    assert sum("header" in line for line in lines) == 2, "one header per start"


@pytest.mark.parametrize(
    ("arm", "force"), [("forespark", "null"), ("forespark", "2"), ("dspark_wcs", "2")]
)
def test_sampled_output_keeps_the_targets_distribution(folder, arm, force):
    """Chi-square of the first two tokens against exact enumeration, temperature 1.

    Planned lengths, and two drafts forced on every request so that most tokens went
    through rejection sampling.
    """
    import torch
    from scipy.stats import chi2
    from transformers import LlamaForCausalLM

    count = 3000
    result = serve(
        folder, arm, f"serve.force_length={force}", temperature=1.0, count=count, tokens=3
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
