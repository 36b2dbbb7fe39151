"""Files of an arm: found, checked, and refused with the command that makes them."""

import json
import struct

import pytest

from forespark import config as configuration
from forespark import record
from forespark.serving import artifacts
from forespark.serving.launch import engine_arguments, serve_command


def write_safetensors(path, size=8):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * size)


def calibration(digest, K=7):
    key = {"target": "smollm2", "drafter": "forespark", "drafter_sha256": digest, "K": K}
    rows = [[1.0] * d for d in range(1, K + 1)]
    curve = [0.1] * K
    pre = {"form": "triangle", "scale": rows, "bias": rows, "samples": rows, "kept": rows,
           "ece_before": curve, "ece_after": curve}  # fmt: skip
    post = {"theta": [1.0] * K, "ece_before": curve, "ece_after": curve, "samples": [1] * K}
    return {"schema": 1, "key": key, "post": post, "pre": pre}


def latency(key):
    return {
        "schema": 1,
        "key": key,
        "draft": {"tokens": [1, 8], "ms": [1.0, 2.0]},
        "verify": {"batch": [1, 4], "per_request": [0, 7], "ms": [[5.0, 6.0], [7.0, 9.0]]},
        "other": {"batch": [1, 4], "ms": [1.0, 1.0]},
    }


@pytest.fixture
def run(tmp_path):
    """A run folder with a complete, tiny ForeSpark drafter; returns a config maker."""
    (tmp_path / "models").mkdir()
    drafter = tmp_path / "drafter"
    (drafter / "forespark").mkdir(parents=True)
    write_safetensors(drafter / "model.safetensors")
    record.write_json(drafter / "config.json", {"block_size": 8})
    digest = record.file_sha256(drafter / "model.safetensors")
    heads = {"target": "smollm2", "drafter_sha256": digest}
    record.write_json(drafter / "forespark" / "heads.json", heads)
    write_safetensors(drafter / "forespark" / "heads.safetensors")
    record.write_json(tmp_path / "calibration.json", calibration(digest))

    def make(*overrides):
        return configuration.load(
            [
                "target=smollm2",
                f"target.model={tmp_path / 'models'}",
                f"drafter.dir={drafter}",
                f"run_dir={tmp_path}",
                *overrides,
            ]
        )

    key = artifacts.latency_key(make("arm=forespark"))
    record.write_json(tmp_path / "latency.json", latency(key))
    make.root, make.drafter = tmp_path, drafter
    return make


def test_everything_present(run):
    found = artifacts.resolve(run("arm=forespark"))
    assert found.calibration == run.root / "calibration.json"
    assert found.latency == run.root / "latency.json"
    assert found.heads == run.drafter / "forespark"


def test_autoregressive_needs_nothing(run):
    assert artifacts.resolve(run("arm=ar", "drafter.dir=/nowhere")) == artifacts.Artifacts()


@pytest.mark.parametrize(
    ("remove", "command"),
    [
        ("drafter/model.safetensors", "train.py"),
        ("drafter/forespark/heads.safetensors", "train.py"),
        ("calibration.json", "calibrate.py"),
        ("latency.json", "curves.py"),
    ],
)
def test_missing_file_names_the_command(run, remove, command):
    (run.root / remove).unlink()
    with pytest.raises(ValueError, match=command):
        artifacts.resolve(run("arm=forespark"))


def test_calibration_of_another_drafter_is_not_used(run):
    write_safetensors(run.drafter / "model.safetensors")
    content = record.read_json(run.root / "calibration.json")
    content["key"]["drafter_sha256"] = "0" * 64
    record.write_json(run.root / "calibration.json", content)
    with pytest.raises(ValueError, match=r"calibrate\.py"):
        artifacts.resolve(run("arm=forespark"))


def test_truncated_checkpoint(run):
    path = run.drafter / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="truncated checkpoint"):
        artifacts.resolve(run("arm=dflash2"))
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="corrupt checkpoint"):
        artifacts.resolve(run("arm=dflash2"))


def test_k_larger_than_the_block(run):
    with pytest.raises(ValueError, match="at most 7 draft tokens"):
        artifacts.resolve(run("arm=forespark", "drafter.num_speculative_tokens=8"))


def test_drafter_of_another_target(run):
    record.write_json(run.drafter / "forespark" / "heads.json", {"target": "qwen14"})
    with pytest.raises(ValueError, match="trained for target 'qwen14'"):
        artifacts.resolve(run("arm=forespark"))


def test_corrupt_json(run):
    (run.drafter / "config.json").write_text('{"block_size": ')
    with pytest.raises(ValueError, match="not valid JSON"):
        artifacts.resolve(run("arm=forespark"))


def test_engine_arguments_by_arm(run):
    found = artifacts.resolve(run("arm=forespark"))
    ours = engine_arguments(run("arm=forespark"), found)
    assert ours["speculative_config"]["method"] == "dflash"
    assert ours["additional_config"]["forespark"]["planned"] is True
    stock = engine_arguments(run("arm=dflash2"), found)
    assert stock["additional_config"]["forespark"]["planned"] is False
    assert stock["speculative_config"]["enable_adaptive_verification"] is False
    assert "speculative_config" not in engine_arguments(run("arm=ar"), artifacts.Artifacts())


def test_flags_of_the_user_come_last(run):
    command = serve_command(run("arm=ar"), artifacts.Artifacts(), ["--max-num-seqs", "3"])
    assert command[-2:] == ["--max-num-seqs", "3"]
    assert json.loads(command[command.index("--additional-config") + 1])["forespark"]["arm"] == "ar"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["arm=dspark", "serve.force_length=3"], "always drafts K tokens"),
        (["arm=forespark", "arm.verify=full"], "want adaptive"),
        (["arm=forespark", "serve.min_draft=8"], "at most K=7"),
    ],
)
def test_combinations_that_cannot_be_served(run, overrides, message):
    with pytest.raises(ValueError, match=message):
        artifacts.resolve(run(*overrides))


@pytest.mark.parametrize(
    "override",
    ["arm.draft=none", "arm.verify=none", "arm.verify=capped"],
)
def test_arm_that_contradicts_itself(run, override):
    with pytest.raises(ValueError, match=r"arm\.draft"):
        run("arm=forespark", override)


def test_calibration_of_another_k_is_refused_before_the_engine_starts(run):
    key = {"target": "smollm2", "drafter": "dspark", "K": 7}
    key["drafter_sha256"] = record.file_sha256(run.drafter / "model.safetensors")
    content = {"schema": 1, "key": key, "pre": None}
    content["post"] = {"theta": [1.0] * 7, "ece_before": [], "ece_after": [], "samples": []}
    record.write_json(run.root / "calibration-dspark.json", content)
    checkpoint = {"block_size": 7, "sample_from_anchor": True}
    record.write_json(run.drafter / "config.json", checkpoint)
    config = run("arm=dspark", "drafter.num_speculative_tokens=5")
    with pytest.raises(ValueError, match="K is 7"):
        engine_arguments(config, artifacts.resolve(config))
    config = run("arm=dspark")
    settings = engine_arguments(config, artifacts.resolve(config))["additional_config"]
    assert settings["forespark"]["theta"] == [1.0] * 7


# A config.json without a block size is vLLM's to judge, so only its non-objects are here.
DAMAGED = [
    (name, content)
    for name in (
        "calibration.json",
        "latency.json",
        "drafter/config.json",
        "drafter/forespark/heads.json",
    )
    for content in ("[]", "3", '{"key": []}', "{}")
    if not (name == "drafter/config.json" and content.startswith("{"))
]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_damaged_json_is_refused_in_one_line(run, name, content):
    (run.root / name).write_text(content)
    with pytest.raises(ValueError, match=r"damaged|run `|another|trained for|schema"):
        artifacts.resolve(run("arm=forespark"))


@pytest.mark.parametrize("name", ["model.safetensors", "forespark/heads.safetensors"])
@pytest.mark.parametrize("header", [b"[]", b'{"w": {}}', b'{"w": 3}', b"\xff", b""])
def test_damaged_checkpoint_header(run, name, header):
    (run.drafter / name).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="corrupt checkpoint"):
        artifacts.resolve(run("arm=forespark"))


def test_heads_of_other_weights(run):
    heads = {"target": "smollm2", "drafter_sha256": "0" * 64}
    record.write_json(run.drafter / "forespark" / "heads.json", heads)
    with pytest.raises(ValueError, match="other weights"):
        artifacts.resolve(run("arm=forespark"))


def test_tables_of_another_machine(run):
    key = {**artifacts.latency_key(run("arm=forespark")), "device": "abacus"}
    record.write_json(run.root / "latency.json", latency(key))
    with pytest.raises(ValueError, match="abacus"):
        artifacts.resolve(run("arm=forespark"))


def test_forced_length_above_k(run):
    with pytest.raises(ValueError, match="at most K=7"):
        artifacts.resolve(run("arm=forespark", "serve.force_length=99"))
