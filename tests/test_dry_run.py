"""Every stage of every target can be planned before there is such hardware."""

from __future__ import annotations

import json
import runpy
import struct
import sys
from pathlib import Path

import pytest

from forespark import config as configuration
from forespark import memory, record
from forespark.serving.artifacts import latency_key

ROOT = Path(__file__).resolve().parent.parent
TARGETS = configuration.names("target")
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 99}  # fmt: skip


def write_safetensors(path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def calibration(key):
    K, curve = key["K"], [0.1] * key["K"]
    rows = [[1.0] * d for d in range(1, K + 1)]
    pre = {"form": "triangle", "scale": rows, "bias": rows, "samples": rows, "kept": rows,
           "ece_before": curve, "ece_after": curve}  # fmt: skip
    post = {"theta": [1.0] * K, "ece_before": curve, "ece_after": curve, "samples": [1] * K}
    return {"schema": 1, "key": key, "post": post, "pre": pre}


@pytest.fixture(params=TARGETS)
def planned(request, tmp_path, monkeypatch):
    """A run folder with a file for everything that a stage looks for; dry-runs a program."""
    target, run = request.param, tmp_path / "run"
    model = tmp_path / "model"
    model.mkdir()
    record.write_json(model / "config.json", SIZES)
    write_safetensors(model / "model.safetensors")
    base = [f"target.model={model}", f"run_dir={run}"]
    config = configuration.load([f"target={target}", *base])
    K = config.drafter.num_speculative_tokens
    for name in ("forespark", "dspark"):
        drafter = run / "drafters" / name
        (drafter / "forespark").mkdir(parents=True)
        write_safetensors(drafter / "model.safetensors")
        digest = record.file_sha256(drafter / "model.safetensors")
        record.write_json(drafter / "config.json", {"block_size": K + 1})
        record.write_json(
            drafter / "forespark/heads.json", {"target": target, "drafter_sha256": digest}
        )
        write_safetensors(drafter / "forespark/heads.safetensors")
        key = {"target": target, "drafter": name, "drafter_sha256": digest, "K": K}
        record.write_json(drafter / "forespark/calibration.json", calibration(key))
    (run / "corpus").mkdir()
    tables = {"draft": {"tokens": [1, 8], "ms": [1.0, 2.0]},
              "verify": {"batch": [1, 4], "per_request": [0, K], "ms": [[5.0, 6.0], [7.0, 9.0]]},
              "other": {"batch": [1, 4], "ms": [1.0, 1.0]}}  # fmt: skip
    record.write_json(
        run / "latency.json", {"schema": 1, "key": latency_key(config, digest), **tables}
    )
    monkeypatch.setattr(memory, "gpus", lambda: [80 * memory.GIB] * 8)
    monkeypatch.chdir(ROOT)

    def dry_run(program, *flags):
        argv = [program, "--target", target, *flags, "--dry-run", *base]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        return ended.value.code

    dry_run.target, dry_run.config = target, config
    return dry_run


def test_every_stage_of_every_target(planned, capsys):
    config = planned.config
    ranks = f"tensor-parallel-size {config.target.tensor_parallel_size}"
    several = config.target.tensor_parallel_size > 1
    for program, flags, wanted in (
        ("data.py", ["--source", "starter"], "vllm.entrypoints.cli.main serve"),
        ("train.py", [], "torch.distributed.run" if several else "train forespark"),
        ("heads.py", [], "estimators of"),
        ("calibrate.py", [], "calibration runs of"),
        ("curves.py", [], "latency profile of"),
        ("serve.py", ["--arm", "forespark"], ranks if several else "--speculative-config"),
        ("eval.py", ["--bench", "decode"], "serve.py --target"),
        ("eval.py", ["--bench", "e2e"], f"loads {config.stream.loads or config.bench.loads}"),
        ("eval.py", ["--bench", "slo"], "probed requests/s"),
        ("eval.py", ["--bench", "mathcode"], "mathcode at loads"),
        ("eval.py", ["--bench", "breakdown"], "breakdown at loads"),
        ("eval.py", ["--bench", "scheduler"], "scheduler, seed"),
    ):
        code = planned(program, *flags)
        shown = capsys.readouterr()
        assert not code, (program, flags, shown.err)
        assert wanted in shown.out, (program, flags, shown.out)
        assert "memory:    weights" in shown.out


def test_paper_values_of_research_targets():
    """Table 1 and Appendices A to C."""
    seen = {}
    for name in ("qwen14", "glm53flash", "glm53"):
        config = configuration.load([f"target={name}"])
        seen[name] = (
            config.target.target_layer_ids, config.drafter.num_layers,
            config.drafter.num_speculative_tokens, config.target.max_num_seqs,
            config.target.max_num_batched_tokens, config.target.cudagraph_max_tokens,
            max(config.bench.loads), max(config.stream.loads or config.bench.loads),
            config.slo.ttft_s, config.slo.tpot_s, config.train.processes,
        )  # fmt: skip
    assert seen == {
        "qwen14": ([1, 10, 19, 28, 37], 5, 15, 512, 24576, 8192, 512, 512, 1.0, 0.05, 6),
        "glm53flash": ([6, 15, 25, 34, 43], 5, 15, 256, 24576, 4096, 192, 256, 1.0, 0.03, 4),
        "glm53": ([6, 20, 34, 48, 62, 76], 6, 15, 256, 24576, 4096, 256, 256, 1.0, 0.04, 4),
    }


def test_memory_of_a_model(tmp_path, monkeypatch):
    config = configuration.load(["target=smollm2", f"target.model={tmp_path}"])
    assert "not known before" in memory.needs(config)[0]
    record.write_json(tmp_path / "config.json", SIZES)
    assert memory.kv_bytes_per_token(SIZES, config) == 4 * 4 * 2 * 2 * 16
    latent = {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert memory.kv_bytes_per_token({"text_config": latent}, config) == 3 * 4 * 576
    monkeypatch.setattr(memory, "gpus", list)
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * memory.GIB)
    with pytest.raises(ValueError, match="wants 4.0 GiB on 1 devices, this machine has 3.0 GiB"):
        memory.needs(config)
    monkeypatch.setattr(memory, "available_memory", lambda: 5 * memory.GIB)
    assert "5.0 GiB are free" in memory.needs(config)[1]
    config.target.tensor_parallel_size = 8
    monkeypatch.setattr(memory, "gpus", lambda: [80 * memory.GIB] * 4)
    with pytest.raises(ValueError, match="has 320.0 GiB on 4"):
        memory.needs(config)
