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


@pytest.fixture
def run(tmp_path):
    """A run folder with a complete, tiny ForeSpark drafter; returns a config maker."""
    (tmp_path / "models").mkdir()
    drafter = tmp_path / "drafter"
    (drafter / "forespark").mkdir(parents=True)
    write_safetensors(drafter / "model.safetensors")
    record.write_json(drafter / "config.json", {"block_size": 8})
    digest = record.file_sha256(drafter / "model.safetensors")
    record.write_json(drafter / "forespark" / "heads.json", {"target": "smollm2"})
    write_safetensors(drafter / "forespark" / "heads.safetensors")
    key = {"target": "smollm2", "drafter": "forespark", "drafter_sha256": digest, "K": 7}
    record.write_json(tmp_path / "calibration.json", {"key": key})
    record.write_json(tmp_path / "latency.json", {})

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
        (["arm=dspark", "serve.force_length=3"], "only the forespark drafter"),
        (["arm=forespark", "arm.verify=full"], "want adaptive"),
    ],
)
def test_combinations_that_cannot_be_served(run, overrides, message):
    with pytest.raises(ValueError, match=message):
        artifacts.resolve(run(*overrides))


@pytest.mark.parametrize("override", ["arm.draft=none", "arm.verify=none", "arm.drafter=dspark"])
def test_arm_that_contradicts_itself(run, override):
    with pytest.raises(ValueError, match=r"arm\.draft"):
        run("arm=forespark", override)


def test_calibration_of_another_k_is_refused_before_the_engine_starts(run):
    key = {"target": "smollm2", "drafter": "dspark", "K": 7}
    key["drafter_sha256"] = record.file_sha256(run.drafter / "model.safetensors")
    content = {"schema": 1, "key": key, "pre": None}
    content["post"] = {"theta": [1.0] * 7, "ece_before": [], "ece_after": [], "samples": []}
    record.write_json(run.root / "calibration-dspark.json", content)
    record.write_json(run.drafter / "config.json", {"block_size": 7})
    config = run("arm=dspark", "drafter.num_speculative_tokens=5")
    with pytest.raises(ValueError, match="K is 7"):
        engine_arguments(config, artifacts.resolve(config))
    config = run("arm=dspark")
    settings = engine_arguments(config, artifacts.resolve(config))["additional_config"]
    assert settings["forespark"]["theta"] == [1.0] * 7
