"""Batch-wise arms: caps measured, chosen, read, refused and applied; the single curve."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_artifacts import run  # noqa: F401  (the fixture)
from test_planner import K, planner

from forespark import record
from forespark.calibration.caps import fastest_caps, write_caps
from forespark.fore_d.envelope import scores_from_logits
from forespark.fore_d.survival import last_row
from forespark.models.estimators import PostDraftEstimator, PreDraftEstimator
from forespark.serving import artifacts
from forespark.serving.caps import cap_ranges, dense
from forespark.serving.estimate import Estimators
from forespark.serving.launch import engine_arguments, planned
from forespark.serving.runner import _cap_offered_drafts

KEY = {"target": "smollm2", "device": "abacus", "K": 2}


def sweep(path, arms=("bw",), key=KEY, loads=(1, 4, 16)):
    """A sweep in which cap 2 - i is the fastest of the i-th load."""
    record.append_jsonl(path, {"header": {"schema": 1, "key": key}})
    for arm in arms:
        for index, load in enumerate(loads):
            for cap in range(key["K"] + 1):
                tokens = 100 - 10 * abs(2 - index - cap)
                row = {"arm": arm, "load": load, "cap": cap, "round": 0}
                record.append_jsonl(path, {**row, "tokens": tokens, "ms": 500.0})
    return path


def caps_file(tmp_path, key=KEY, arms=("bw",), loads=(1, 4, 16)):
    runs, out = tmp_path / "caps.jsonl", tmp_path / "caps.json"
    text = write_caps(sweep(runs, arms, key, loads), key, arms, list(loads), out)
    return out, text


def test_the_fastest_cap_of_every_load_comes_back_as_ranges(tmp_path):
    path, text = caps_file(tmp_path)
    content = record.read_json(path)
    assert content["bw"]["loads"] == [1, 4, 16] and content["bw"]["caps"] == [2, 1, 0]
    assert content["bw"]["throughput"][0] == [160.0, 180.0, 200.0]
    assert content["provenance"] and "k=2" in text
    ranges = cap_ranges(content, "bw", KEY)
    assert ranges == [[1, 2, 2], [3, 8, 1], [9, 16, 0]]
    assert dense(ranges, 20) == [0, 2, 2, *[1] * 6, *[0] * 12]
    assert dense(ranges, 3) == [0, 2, 2, 1]


def test_rounds_add_up_and_ties_go_to_the_smaller_cap():
    point = {"arm": "bw", "load": 4, "ms": 100.0}
    rows = [{**point, "cap": cap, "tokens": 10} for cap in (0, 1, 1)]
    assert fastest_caps(rows, "bw", [4], 1)["caps"] == [0]
    rows.append({**point, "cap": 1, "tokens": 13})
    assert fastest_caps(rows, "bw", [4], 1)["throughput"] == [[100.0, pytest.approx(110.0)]]


@pytest.mark.parametrize("lost", [{"cap": 1}, {"load": 16}, {"arm": "bw"}])
def test_an_unfinished_sweep_chooses_nothing(tmp_path, lost):
    rows = record.read_jsonl(sweep(tmp_path / "s"))[1:]
    rows = [row for row in rows if any(row[name] != value for name, value in lost.items())]
    with pytest.raises(ValueError, match=r"no tokens measured at \(load, cap\) \["):
        fastest_caps(rows, "bw", [1, 4, 16], 2)


def test_another_arm_measured_earlier_is_kept(tmp_path):
    runs, out = sweep(tmp_path / "s", ("bw", "bw_stock")), tmp_path / "caps.json"
    write_caps(runs, KEY, ["bw"], [1, 4, 16], out)
    assert cap_ranges(record.read_json(out), "bw_stock", KEY)
    record.append_jsonl(runs, {**record.read_jsonl(runs)[1], "arm": "late"})
    write_caps(runs, KEY, ["bw"], [1, 4, 16], out)
    assert "late" not in record.read_json(out)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: [], "damaged"),
        (lambda c: {**c, "schema": 2}, "damaged"),
        (lambda c: {**c, "key": None}, "made for"),
        (lambda c: {**c, "key": {**KEY, "device": "other"}}, "device is 'other' there"),
        (lambda c: {n: v for n, v in c.items() if n != "bw"}, "no caps of arm bw"),
        (lambda c: {**c, "bw": 3}, "want lists"),
        (lambda c: {**c, "bw": {**c["bw"], "caps": [2, 1]}}, "differ in length"),
        (lambda c: {**c, "bw": {**c["bw"], "caps": [2, 1, 1]}}, "fastest is 0"),
        (lambda c: {**c, "bw": {**c["bw"], "loads": [4, 1, 16]}}, "increasing"),
        (lambda c: {**c, "bw": {"loads": [], "caps": [], "throughput": []}}, "increasing"),
        (lambda c: {**c, "bw": {**c["bw"], "throughput": [[1.0, 2.0]] * 3}}, "want 3"),
        (lambda c: {**c, "bw": {**c["bw"], "throughput": [[1.0, 2.0, 0.0]] * 3}}, "above 0"),
        (lambda c: {**c, "bw": {**c["bw"], "throughput": [["1", 2, 3]] * 3}}, "above 0"),
    ],
)
def test_caps_that_cannot_be_used_name_the_command(tmp_path, change, words):
    content = record.read_json(caps_file(tmp_path)[0])
    with pytest.raises(ValueError, match=words) as refused:
        cap_ranges(change(content), "bw", KEY)
    assert "python calibrate.py calibrate.caps=[bw] --target smollm2" in str(refused.value)


def test_arms_find_their_caps(run):  # noqa: F811
    for arm in ("bw", "bw_stock"):
        with pytest.raises(ValueError, match=rf"calibrate\.caps=\[{arm}\] --target smollm2"):
            artifacts.resolve(run(f"arm={arm}"))
    key = artifacts.latency_key(run("arm=bw"))
    loads = (1, 4, 16)
    caps_file(run.root, key, ("bw",), loads)
    with pytest.raises(ValueError, match="no caps of arm bw_stock"):
        artifacts.resolve(run("arm=bw_stock"))
    (run.root / "caps.jsonl").unlink()
    caps_file(run.root, key, ("bw", "bw_stock"), loads)
    wanted = [[1, 2, 2], [3, 8, 1], [9, 16, 0]]
    for arm, ours in (("bw", True), ("bw_stock", False)):
        config = run(f"arm={arm}")
        found = artifacts.resolve(config)
        arguments = engine_arguments(config, found)
        assert planned(config) is ours
        assert (found.heads is not None) is ours and found.latency is found.calibration is None
        assert arguments["additional_config"]["forespark"]["caps"] == wanted
        speculative = arguments["speculative_config"]
        assert speculative["enable_adaptive_verification"] is ours
        stock = speculative.get("num_speculative_tokens_per_batch_size")
        assert stock == (None if ours else wanted)
    # While caps are measured vLLM gets a row of every cap.
    config = run("arm=bw_stock")
    found = artifacts.resolve(config, calibration=False)
    table = engine_arguments(config, found)["speculative_config"]
    rows = table["num_speculative_tokens_per_batch_size"]
    assert [row[2] for row in rows] == list(range(8))


def test_every_request_drafts_the_cap_of_its_load():
    host = planner(draft="capped", verify="full", caps=[[1, 2, 3], [3, 6, 1]])
    for load, samples, length in ((1, 1, 3), (2, 1, 3), (3, 2, 1), (8, 8, 1)):
        total = host.draft_lengths_total(np.arange(load), np.arange(load) < samples)
        assert (total, host.same_length) == (samples * length, length)
    assert host.budget(np.arange(3), np.array([3, 0, 2]), 3, 3, 5) == 5, "all drafts are verified"


def test_a_scheduler_without_asynchronous_steps_is_offered_the_cap():
    drafts = np.arange(2 * K).reshape(2, K)
    handler = SimpleNamespace(num_draft_tokens=K, draft_tokens_np=drafts)
    runner = SimpleNamespace(draft_tokens_handler=handler, forespark_cap=1)
    _cap_offered_drafts(runner)
    assert handler.num_draft_tokens == 1 and handler.draft_tokens_np.tolist() == [[0], [K]]
    handler.draft_tokens_np, runner.forespark_cap = None, 0
    _cap_offered_drafts(runner)
    assert handler.num_draft_tokens == 0


def single_curve(form: str, width: int) -> Estimators:
    """Estimators with random weights that read ``form`` from a triangle's logits."""
    torch.manual_seed(0)
    pre = PreDraftEstimator(K, 6, 5, 3)
    torch.nn.init.normal_(pre.w_o.weight)
    post = PostDraftEstimator(6, 2)
    scale, bias = torch.linspace(0.5, 1.5, width), torch.linspace(-0.2, 0.4, width)
    found = Estimators(pre, post, K, form, scale, bias, torch.ones(K), None)
    found._norm = (torch.ones(6), 1e-6)
    return found


def test_the_single_curve_reads_row_k_for_every_length():
    triangle = K * (K + 1) // 2
    found = single_curve("row", K)
    inputs = torch.randn(4, 6), torch.randn(4, 5)
    with torch.inference_mode():
        first = found.before_draft(*inputs)
        row = last_row(first.logits, K)
        wanted, _ = scores_from_logits(row, found.scale, found.bias, K, "row")
        # Survival of row K alone: R(d) is its first d terms, so its scores are the survival.
        survival = torch.sigmoid(row * found.scale + found.bias).cumprod(-1)
    torch.testing.assert_close(first.scores, wanted)
    torch.testing.assert_close(first.scores, survival, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        found.pre.w_o.bias[: triangle - K] += 5.0  # the rows of every d < K
    with torch.inference_mode():
        torch.testing.assert_close(found.before_draft(*inputs).scores, first.scores)
        full = single_curve("triangle", triangle)
        assert not torch.allclose(full.before_draft(*inputs).scores, first.scores)
