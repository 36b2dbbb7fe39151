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
