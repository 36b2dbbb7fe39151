"""Servers of the decode benchmark: started, told apart, and gone at the end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from forespark import process
from forespark.bench import rounds, server
from forespark.bench.decode import DecodeBenchmark
from forespark.bench.records import LoadRecord, read_records
from forespark.config import load

MOCK = Path(__file__).with_name("mock_server.py")


def mock_server(tmp_path, mode="serve", timeout_s=20.0, port=0):
    import socket

    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    command = [sys.executable, str(MOCK), "--port", str(port), f"mock.mode={mode}"]
    return server.Server(
        command, host="127.0.0.1", port=port, log=tmp_path / "log", ready_timeout_s=timeout_s
    )


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"


def test_server_with_children_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_STOP_S", 0.3)
    monkeypatch.setattr(process, "ORPHAN_S", 0.3)  # it ignores SIGTERM, so this is waited for
    pids = []

    def use_and_fail():
        with mock_server(tmp_path, "stubborn") as served:
            pids.extend([served.process.pid, int((tmp_path / "log").read_text().split()[1])])
            assert served.alive()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        use_and_fail()
    time.sleep(0.1)
    assert all(gone(pid) for pid in pids)


def test_children_of_a_server_that_died_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "ORPHAN_S", 0.3)
    with mock_server(tmp_path, "stubborn") as served:
        child = int((tmp_path / "log").read_text().split()[1])
        os.kill(served.process.pid, 9)
        served.process.wait()
    assert gone(child)


def test_server_that_dies_shows_its_log(tmp_path, capsys):
    with pytest.raises(ValueError, match="ended with exit code 3"), mock_server(tmp_path, "die"):
        pass
    assert "could not load the drafter" in capsys.readouterr().err


def test_server_that_is_never_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "healthy", lambda url: False)
    with (
        pytest.raises(ValueError, match="not ready after 1 s"),
        mock_server(tmp_path, timeout_s=1) as served,
    ):
        assert served is None


def test_used_port_is_refused(tmp_path):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(OSError, match=f"port {port} .* cannot be used"),
            mock_server(tmp_path, port=port),
        ):
            pass


def test_serve_command_passes_what_differs(tmp_path):
    folder = "models/it's mine"
    config = load(
        [
            "target=smollm2",
            f"drafter.dir={server.quote(folder)}",
            "target.max_num_seqs=4",
            "bench.rounds=9",
            "serve.port=8123",
        ]
    )
    command = server.serve_command(config, "forespark", trace=tmp_path / "t.jsonl")
    text = " ".join(command)
    assert "--target smollm2 --arm forespark --port 8123" in text
    assert "target.max_num_seqs=4" in command and "bench.rounds" not in text
    assert "--scheduler-cls forespark.serving.barrier.BarrierScheduler" in text
    assert command[-1] == "--no-enable-prefix-caching"
    cached = server.serve_command(config, "forespark", prefix_cache=True)
    assert "--no-enable-prefix-caching" not in cached and cached[-2] == "--scheduler-cls"
    again = load([c for c in command if c.startswith(("drafter.", "target.", "serve."))])
    assert again.drafter.dir == folder and again.target.max_num_seqs == 4
    assert again.serve.trace == str(tmp_path / "t.jsonl")


def test_servers_are_started_once_per_arm_and_round(config, tmp_path, monkeypatch):
    config.bench.arms, config.bench.loads = ["ar", "forespark"], [1]
    started = []

    def command(config, arm, *, trace=None, port=None, prefix_cache=False):
        started.append(arm)
        return [sys.executable, str(MOCK), "--port", str(port)]

    config.serve.port = mock_server(tmp_path).port
    monkeypatch.setattr(rounds, "serve_command", command)
    DecodeBenchmark(config, tmp_path / "out").run()
    assert started == ["ar", "ar", "forespark", "forespark", "ar"]  # answers, round 0, round 1
    rows = read_records(tmp_path / "out/records.jsonl", LoadRecord)
    assert {(r.arm, r.round) for r in rows} == {
        ("ar", 0),
        ("ar", 1),
        ("forespark", 0),
        ("forespark", 1),
    }
    by_round = {r: {tuple(x.prompt_ids) for x in rows if x.round == r} for r in (0, 1)}
    assert all(len(prompts) == 1 for prompts in by_round.values())  # every arm: same prompts


def test_side_by_side_arms_take_turns_batch_by_batch(config, tmp_path, monkeypatch):
    config.bench.arms, config.bench.loads = ["ar", "dspark", "forespark"], [1, 2]
    config.bench.side_by_side = True
    config.serve.port = mock_server(tmp_path).port
    ports = {}

    def command(config, arm, *, trace=None, port=None, prefix_cache=False):
        ports.setdefault(port, []).append(arm)
        mode = "die" if arm == "dspark" and len(ports) == 3 else "serve"
        return [sys.executable, str(MOCK), "--port", str(port), f"mock.mode={mode}"]

    monkeypatch.setattr(rounds, "serve_command", command)
    first = config.serve.port
    with pytest.raises(ValueError, match="1 failures"):  # dspark, in the second round
        DecodeBenchmark(config, tmp_path / "out").run()
    assert ports == {
        first: ["ar", "ar", "dspark"],  # for its answers, round 0, round 1
        first + 1: ["dspark", "forespark"],
        first + 2: ["forespark", "ar"],
    }
    rows = read_records(tmp_path / "out/records.jsonl", LoadRecord)
    order = [(row.round, row.load, row.arm) for row in rows]
    assert order == [
        (0, 1, "ar"), (0, 1, "dspark"), (0, 1, "forespark"),
        (0, 2, "dspark"), (0, 2, "forespark"), (0, 2, "ar"),
        (1, 1, "forespark"), (1, 1, "ar"), (1, 2, "ar"), (1, 2, "forespark"),
    ]  # fmt: skip
