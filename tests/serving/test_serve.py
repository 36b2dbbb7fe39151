"""serve.py as a user meets it: errors before any work, metrics, trace, a clean end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import tiny
import torch

from forespark.serving.dspark import temper

ROOT = tiny.configuration.CONFIG_DIR.parent


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "serve.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def test_missing_drafter_names_the_command(tmp_path):
    done = run("--arm", "forespark", f"run_dir={tmp_path}", f"drafter.dir={tmp_path}")
    assert done.returncode == 2
    assert "train.py --target smollm2" in done.stderr and "Traceback" not in done.stderr


def test_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--arm", "ar", "--port", str(port), "target.model=configs")
    assert done.returncode == 1
    assert f"port {port}" in done.stderr and "in use" in done.stderr


def test_dry_run_prints_the_command():
    done = run("--arm", "ar", "--dry-run", "--max-num-seqs", "3", "target.model=configs")
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs 3" in done.stdout and "serve configs" in done.stdout


def test_tempered_confidence():
    p = torch.tensor([[0.0, 0.5, 0.9, 1.0]])
    theta = torch.tensor([2.0, 3.0, 0.5, 2.0])
    odds = (0.9 / 0.1) ** 2
    expected = torch.tensor([[0.0, 0.5, odds / (1 + odds), 1.0]])
    torch.testing.assert_close(temper(p, theta), expected)


@pytest.mark.engine
def test_a_served_arm_answers_counts_and_leaves_nothing(tiny_folder, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = tiny.overrides_for(tiny_folder, "forespark")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "serve.py", "--port", str(port), "--arm", "forespark"]
        + ["--trace", str(trace), "--skip-tokenizer-init", *overrides],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        body = {"model": "smollm2", "prompt": [5, 7, 9, 3], "max_tokens": 20, "ignore_eos": True}
        body |= {"temperature": 0, "detokenize": False, "return_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)
        assert len(answer["choices"][0]["token_ids"]) == 20
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
            metrics = reply.read().decode()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    steps = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    for name, field in (("drafted", "drafted"), ("verified", "B"), ("accepted", "accepted")):
        total = sum(row[field] for row in steps)
        line = f'forespark:{name}_tokens_total{{arm="forespark"}} {float(total)}'
        assert line in metrics, (line, [x for x in metrics.splitlines() if "forespark:" in x])
    assert "forespark:plan_time_microseconds_bucket" in metrics
    assert not _alive(process.pid)


def _wait(url: str, process: subprocess.Popen) -> None:
    for _ in range(240):
        assert process.poll() is None, "the server ended before it was ready"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError("the server was not ready in time")


def _alive(group: int) -> list[str]:
    """Command names of processes whose parents lead back to the server's session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        state, session = fields[0], int(fields[3])
        if session == group and state != "Z":
            found.append(stat.parent.name)
    return found
