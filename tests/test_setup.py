"""setup.sh stops with one clear sentence, and the target's conversion knows whole from torn."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import convert_target  # noqa: E402
import verify_install  # noqa: E402


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What setup.sh reads, in a folder of its own, with a folder ``bin`` first on PATH."""
    for name in ("setup.sh", "pyproject.toml", "requirements", "scripts/verify_install.py"):
        source, copy = ROOT / name, tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    (tmp_path / "bin").mkdir()
    return tmp_path


def setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "setup.sh"],
        cwd=checkout,
        env={**os.environ, "FORESPARK_DEVICE": "cpu", "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_old_python_is_refused(checkout: Path) -> None:
    old = script(checkout / "bin" / "oldpython", "exit 1")
    result = setup(checkout, FORESPARK_PYTHON=str(old))
    assert result.returncode == 1
    assert result.stderr.startswith("setup.sh: Python 3.11 or newer is needed")
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_device_is_refused(checkout: Path) -> None:
    result = setup(checkout, FORESPARK_DEVICE="tpu", FORESPARK_PYTHON=sys.executable)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "'tpu', want cpu or cuda" in result.stderr


def test_too_little_disk_is_refused_before_anything_is_installed(checkout: Path) -> None:
    script(checkout / "bin" / "df", "printf 'head\\n/dev/x 9 9 2097152 9%% /\\n'")
    result = setup(checkout, FORESPARK_PYTHON=sys.executable)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "only 2 GiB free here, 6 GiB needed" in result.stderr
    assert not (checkout / ".venv" / "bin").exists()


@pytest.mark.slow
def test_a_failed_download_is_one_sentence_after_pip_s_own_words(checkout: Path) -> None:
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout / "bin")}
    result = setup(checkout, FORESPARK_PYTHON=sys.executable, PIP_CONFIG_FILE=os.devnull, **nowhere)
    assert result.returncode == 1
    assert "setup.sh: a package could not be installed" in result.stderr.splitlines()[-1]
    assert not (checkout / ".venv" / ".forespark-stamp").exists()


def test_a_wrong_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify_install.PINS, "numpy", "0.0.1")
    monkeypatch.setitem(verify_install.PINS, "no-such-package", "1")
    text = " ".join(verify_install.problems("cuda"))
    assert "want 0.0.1 for cuda" in text
    assert "no-such-package is not installed" in text


def test_vllm_metadata_is_found_by_importlib(tmp_path: Path) -> None:
    verify_install.add_vllm_metadata(tmp_path)
    (found,) = verify_install.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("vllm", "0.30.0+cpu")
    assert found.files is not None


SCRIPTS = ("training/train.sh", "bench/decode.sh", "calibration/calibrate.sh")


def call(program: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [program, str(path), *arguments]
    environment = {**os.environ, "SHARED_DATA": "no-such-folder"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", [*SCRIPTS, "training/shipped_corpus.sh"])
def test_scripts_explain_themselves_and_want_the_environment(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "scripts" / name
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / name, copy)
    shutil.copy(ROOT / "scripts" / "stage.sh", tmp_path / "scripts")
    asked = call("bash", copy, "--help")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith(f"usage: scripts/{name} ")
    if name in SCRIPTS:
        bare = call("bash", copy)
        assert (bare.returncode, bare.stdout, bare.stderr) == (2, "", asked.stdout)
    lacking = call("bash", copy, "smollm2")
    assert lacking.returncode == 2
    assert lacking.stderr == f"{copy.name}: no .venv here; run ./setup.sh first\n"


def test_shipped_corpus_names_the_folder_it_misses(tmp_path: Path) -> None:
    copy = tmp_path / "scripts" / "training" / "shipped_corpus.sh"
    for folder in (copy.parent, tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "training" / copy.name, copy)
    script(tmp_path / ".venv" / "bin" / "python", "exit 9")
    result = call("bash", copy)
    assert result.returncode == 2
    assert "no folder no-such-folder" in result.stderr


def test_verify_install_wants_its_argument() -> None:
    for arguments in ([], ["tpu"]):
        result = call(sys.executable, ROOT / "scripts" / "verify_install.py", *arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("usage: ")


def model_folder(folder: Path, missing_bytes: int = 0) -> Path:
    folder.mkdir()
    for name in convert_target.FILES:
        (folder / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(8 - missing_bytes)
    (folder / "model.safetensors").write_bytes(data)
    return folder


def test_only_a_whole_conversion_is_reused(tmp_path: Path) -> None:
    assert convert_target.is_valid(model_folder(tmp_path / "whole"))
    assert not convert_target.is_valid(model_folder(tmp_path / "torn", missing_bytes=3))
    assert not convert_target.is_valid(tmp_path / "absent")
    partial = model_folder(tmp_path / "no_tokenizer")
    (partial / "tokenizer.json").unlink()
    assert not convert_target.is_valid(partial)
    garbage = model_folder(tmp_path / "garbage")
    (garbage / "model.safetensors").write_bytes(b"\xff" * 40)
    assert not convert_target.is_valid(garbage)
