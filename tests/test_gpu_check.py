"""The GPU check itself, at a tiny size in the interpreter: it agrees, and it notices faults."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("scripts/gpu_check.sh does this on a GPU", allow_module_level=True)


@pytest.fixture(scope="module")
def check(root):
    spec = importlib.util.spec_from_file_location("gpu_check", root / "scripts/gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TINY = {**module.TINY, "requests": [3]}
    return module


def test_kernels_agree_and_a_record_is_left(check, tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite tests="2" failures="0" errors="0" skipped="1">'
        '<testcase classname="a" name="b"/></testsuite></testsuites>'
    )
    out = tmp_path / "gpu_check.json"
    assert check.main(["--dry", "--tests", str(report), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["ok"] and written["mode"] == "interpreter" and written["tests"]["tests"] == 2
    assert {row["stage"] for row in written["times"]} == set(check.KERNELS)
    assert len(written["compared"]) == 5 * len(check.KERNELS)


def test_a_wrong_kernel_is_noticed(check, monkeypatch):
    def wrong(values, limits, total):
        out = check.PLAIN["split"](values, limits, total)
        out[0] = (out[0] + 1) % 3
        return out

    monkeypatch.setitem(check.KERNELS, "split", wrong)
    step = check.Step(3, check.TINY, "cpu")
    step.plan(2)
    # Only the stage under test, which reads what the first one made.
    step.stage(check.KERNELS, "split", step.z[:, :3].abs(), step.limits, step.total)
    assert [row["ok"] for row in check.compare(step, 2)] == [False]


def test_a_failed_test_fails_the_check(check, tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite tests="1" failures="1" errors="0" skipped="0">'
        '<testcase classname="a" name="b"><failure/></testcase></testsuite></testsuites>'
    )
    assert check.tested(report)["failed"] == ["a::b"]


def test_without_a_gpu_it_says_what_to_do(check, tmp_path, capsys):
    assert check.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "--dry" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_script_names_tests_that_exist_and_refuses_other_words(root):
    script = root / "scripts/gpu_check.sh"
    done = subprocess.run([script, "--fast"], capture_output=True, text=True)
    assert done.returncode == 2 and "--dry" in done.stderr
    block = script.read_text().partition("tests=(")[2].partition(")")[0]
    assert all((root / path).exists() for path in block.split()) and len(block.split()) > 5


def test_what_it_imports_needs_no_vllm(root):
    """The machine it runs on has torch and triton, and need not have vllm."""
    waiting, seen = [root / "scripts/gpu_check.py"], set()
    while waiting:
        path = waiting.pop()
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                assert not name.startswith("vllm"), f"{path} imports {name}"
                found = root / (name.replace(".", "/") + ".py")
                if name.startswith("forespark.") and found.exists() and name not in seen:
                    seen.add(name)
                    waiting.append(found)
    assert "forespark.serving.kernels.walk" in seen


def test_the_compiler_takes_every_kernel(check, root, tmp_path):
    """The interpreter runs code that the compiler refuses: branches that change a shape, say."""
    command = [sys.executable, "scripts/gpu_check.py", "--compile", "--dry"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(root)
    out = tmp_path / "compiled.json"
    done = subprocess.run(
        [*command, "--out", out], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    rows = json.loads(out.read_text())["compiled"]
    assert {row["kernel"] for row in rows} == {name.strip("_") for _, name in check.JITTED}
    assert not any(row["stack_bytes"] for row in rows)
