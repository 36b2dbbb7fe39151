"""Every configuration composes, reloads, and refuses bad keys, types and values."""

from __future__ import annotations

from pathlib import Path

import pytest

from forespark import config

# Paper, Table 1: captured layers, drafter layers, K, TP, EP, requests, tokens, graphs, loads.
TABLE_1 = {
    "qwen14": ([1, 10, 19, 28, 37], 5, 15, 8, False, 512, 24576, 8192, 512),
    "glm53flash": ([6, 15, 25, 34, 43], 5, 15, 8, True, 256, 24576, 4096, 192),
    "glm53": ([6, 20, 34, 48, 62, 76], 6, 15, 8, True, 256, 24576, 4096, 256),
}


@pytest.mark.parametrize("target", config.names("target"))
@pytest.mark.parametrize("arm", config.names("arm"))
def test_every_target_and_arm_composes_and_reloads(target: str, arm: str, tmp_path: Path) -> None:
    loaded = config.load([f"target={target}", f"arm={arm}"])
    assert loaded.target.name == target
    assert loaded.arm.name == arm
    assert loaded.run_dir == f"runs/{target}"
    assert set(loaded.bench.arms) <= set(config.names("arm"))
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(loaded))
    assert config.reload(path) == loaded


@pytest.mark.parametrize("target", TABLE_1)
def test_research_targets_hold_the_values_of_table_1(target: str) -> None:
    c = config.load([f"target={target}"])
    assert TABLE_1[target] == (
        c.target.target_layer_ids,
        c.drafter.num_layers,
        c.drafter.num_speculative_tokens,
        c.target.tensor_parallel_size,
        c.target.expert_parallel,
        c.target.max_num_seqs,
        c.target.max_num_batched_tokens,
        c.target.cudagraph_max_tokens,
        max(c.bench.loads),
    )
    assert c.target.sparse_mla == target.startswith("glm")
    assert c.serve.split == ("host" if c.target.sparse_mla else "device")
    assert (c.train.epochs, c.train.lr, c.train.dspark_lr) == (3, 6e-4, 3e-4)
    assert (c.train.total_seq_len, c.train.max_anchors) == (8192, 3072)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("target=llama", "unknown target 'llama': want one of"),
        ("arm=best", "unknown arm 'best': want one of"),
        ("train.learning_rate=1", "learning_rate"),
        ("bench.loads=[one]", "Integer"),
        ("data.limit=0", "--limit"),
        ("bench.limit=-3", "--limit"),
        ("train.max_steps=0", "--max-steps"),
        ("drafter.num_speculative_tokens=0", "num_speculative_tokens"),
        ("arm.draft=sometimes", "arm.draft"),
        ("serve.split=both", "serve.split"),
        ("serve.port=99999", "serve.port (--port): got 99999, want 1..65535"),
        ("serve.port=0", "serve.port"),
        ("serve.ready_timeout_s=0", "serve.ready_timeout_s"),
        ("serve.barrier=-1", "serve.barrier"),
        ("bench.arms=[ar,nope]", "bench.arms"),
        ("bench.arms=[ar,ar]", "each at most once"),
        ("bench.warmup_tokens=-1", "bench.warmup_tokens"),
        ("bench.max_prompt_tokens=0", "bench.max_prompt_tokens"),
        ("bench.temperature=-1", "bench.temperature"),
        ("data.concurrency=0", "data.concurrency"),
        ("data.temperature=-0.1", "data.temperature"),
        ("data.max_tokens=0", "data.max_tokens: got 0, want >= 1"),
        ("train.lr=0", "train.lr"),
        ("train.muon_lr=-1", "train.muon_lr"),
        ("train.epochs=0", "train.epochs"),
        ("curves.steps_per_point=0", "curves.steps_per_point"),
        ("curves.batch_sizes=[0]", "curves.batch_sizes"),
        ("calibrate.bins=0", "calibrate.bins"),
        ("calibrate.pre_loads=[]", "calibrate.pre_loads"),
        ("calibrate.caps=[dspark]", "calibrate.caps: got ['dspark'], want each at most once"),
        ("calibrate.cap_loads=[0]", "calibrate.cap_loads"),
        ("calibrate.cap_prompts=0", "calibrate.cap_prompts"),
        ("serve.min_gain=-0.1", "serve.min_gain"),
        ("serve.min_gain=nan", "serve.min_gain"),
        ("serve.min_batch=-1", "serve.min_batch: got -1, want >= 0"),
        ("serve.min_draft=-1", "serve.min_draft"),
        ("schedule.prior_acceptance=1", "schedule.prior_acceptance"),
        ("target.tensor_parallel_size=0", "target.tensor_parallel_size"),
        ("+bench.nope=1", "unknown key bench.nope: want one of arms, loads"),
        ("+nope=1", "unknown key nope: want one of target, arm"),
        ("bench.nope=1", "unknown key bench.nope: want one of arms, loads"),
        ("train.lr=fast", "train.lr: Value 'fast'"),
        ("train.lr=[1", "train.lr=[1: "),
    ],
)
def test_bad_settings_are_refused_with_a_reason(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".+") as caught:
        config.load([override])
    assert words in str(caught.value)


def test_reload_refuses_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(config.load([])) + "surprise: 1\n")
    with pytest.raises(ValueError, match="surprise"):
        config.reload(path)


@pytest.mark.parametrize(
    ("stage", "override", "words"),
    [
        ("eval", "bench.loads=[1,65]", r"bench\.loads: .*target\.max_num_seqs, which is 64"),
        ("curves", "curves.batch_sizes=[65]", r"curves\.batch_sizes"),
        ("curves", "curves.batch_sizes=[]", r"curves\.batch_sizes"),
        ("curves", "curves.context_len=2048", r"curves\.context_len: .* which is 2048"),
        ("calibrate", "calibrate.cap_loads=[65]", r"calibrate\.cap_loads"),
    ],
)
def test_sizes_that_the_target_cannot_hold(stage: str, override: str, words: str) -> None:
    loaded = config.load([override, "calibrate.caps=[bw]"])
    config.check_stage(loaded, "data")  # which does not read them
    with pytest.raises(ValueError, match=words):
        config.check_stage(loaded, stage)


def test_every_target_holds_its_own_sizes() -> None:
    for target in config.names("target"):
        for stage in ("eval", "curves"):
            config.check_stage(config.load([f"target={target}"]), stage)


def test_local_names_are_never_asked_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models/smollm2", "runs/x/y", "./a", "../a", "/a/b"):
        assert config.local_path(name)
        with pytest.raises(ValueError, match="no such directory"):
            config.require_model(name)
    with pytest.raises(ValueError, match=r"^models/smollm2: no such directory; run \./setup\.sh$"):
        config.require_model("models/smollm2")
    assert not config.local_path("owner/model")
    config.require_model("owner/model")
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert config.local_path("owner/model")
