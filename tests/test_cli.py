"""The shared command-line front end: flags, errors, exit codes, and what it never imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from forespark import cli, config

FLAGS = ("target", "arm", "bench", "drafter", "limit", "max-steps", "source", "out", "dry-run")


def parse(name: str, *argv: str, **options):
    return cli.stage(name, "text", *FLAGS, "trace", "port", argv=argv, **options)


def program(tmp_path: Path, body: str, *argv: str) -> subprocess.CompletedProcess:
    """Run a small program built on ``cli`` in a fresh interpreter."""
    path = tmp_path / "prog.py"
    indented = textwrap.indent(textwrap.dedent(body), "    ")
    path.write_text(
        f"import sys\nfrom forespark import cli\n\n\ndef main():\n{indented}\n\ncli.run(main)\n"
    )
    return subprocess.run(
        [sys.executable, str(path), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(cli.ROOT)},
    )


@pytest.mark.parametrize(
    ("name", "section"),
    [("data", "data"), ("train", "train"), ("heads", "train"), ("calibrate", "calibrate"),
     ("curves", "curves"), ("eval", "bench")],
)  # fmt: skip
def test_limit_reaches_the_stage(name: str, section: str) -> None:
    _, loaded = parse(name, "--limit", "7")
    assert getattr(loaded, section).limit == 7


def test_flags_become_settings_and_overrides_win() -> None:
    args, loaded = parse(
        "train", "--max-steps", "20", "--drafter", "dspark", "--out", "x", "train.max_steps=9"
    )
    assert (args.drafter, args.out, args.max_steps) == ("dspark", Path("x"), 20)
    assert loaded.train.max_steps == 9


def test_sources_may_hold_any_path() -> None:
    _, loaded = parse("data", "--source", "file:/a b's, c=[d]/$x.jsonl", "--source", "magpie")
    assert loaded.data.sources == ["file:/a b's, c=[d]/$x.jsonl", "magpie"]


def test_eval_takes_several_arms() -> None:
    _, loaded = parse("eval", "--arm", "ar,forespark", "bench.loads=[1,8]")
    assert loaded.bench.arms == ["ar", "forespark"]
    assert loaded.bench.loads == [1, 8]
    assert parse("eval", "--arm", "ar, forespark")[1].bench.arms == ["ar", "forespark"]
    with pytest.raises(ValueError, match="--arm: got ar more than once"):
        parse("eval", "--arm", "ar,forespark,ar")
    with pytest.raises(ValueError, match="unknown arm 'nope'"):
        parse("eval", "--arm", "ar,nope")


def test_trace_has_a_default_place() -> None:
    assert parse("serve", "--trace")[1].serve.trace == "runs/smollm2/traces/serve.jsonl"
    assert parse("serve", "--trace", "t.jsonl")[1].serve.trace == "t.jsonl"
    assert parse("serve")[1].serve.trace is None


def test_serve_collects_unknown_flags_and_still_takes_overrides() -> None:
    args, loaded = parse(
        "serve", "serve.port=9", "--enable-x", "--y", '{"a": 1}', "--z", "k=v", "--port", "7",
        "schedule.price_other=false", passthrough=True,
    )  # fmt: skip
    assert args.extra == ["--enable-x", "--y", '{"a": 1}', "--z", "k=v"]
    assert loaded.serve.port == 9
    assert loaded.schedule.price_other is False


@pytest.mark.parametrize("argv", [["--unknown"], ["stray"], ["--max", "3"], ["--limit", "x"]])
def test_other_stages_refuse_unknown_arguments(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("data", *argv)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--limit", "0"],
        ["--target", "x"],
        ["--bench", "x"],
        ["--max-steps", "-1"],
        ["a.b=1"],
        ["--port", "99999"],
        ["+bench.nope=1"],
    ],
)
def test_bad_values_stop_before_any_work(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse("data", *argv)


def test_parsing_stays_light_and_help_is_fast(tmp_path: Path) -> None:
    body = """
        cli.stage("data", "text", "target", "limit", argv=["--limit", "3"])
        heavy = {"torch", "vllm", "transformers", "datasets", "numba"} & set(sys.modules)
        assert not heavy, heavy
        cli.stage("data", "text", "target", "limit")
    """
    begin = time.monotonic()
    result = program(tmp_path, body, "--help")
    assert result.returncode == 0, result.stderr
    assert "--limit N" in result.stdout
    # Two interpreters' worth of slack on a busy machine; importing vllm takes far longer.
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("raises", "code", "words"),
    [
        ("ValueError('got 3,\\n want 4')", 2, "prog.py: error: got 3, want 4\n"),
        ("OSError(98, 'Address already in use')", 1, "Address already in use"),
        ("KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, raises: str, code: int, words: str) -> None:
    result = program(tmp_path, f"raise {raises}")
    assert result.returncode == code
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_sigterm_unwinds_so_that_servers_are_stopped(tmp_path: Path) -> None:
    body = f"""
        import os, signal
        try:
            os.kill(os.getpid(), {int(signal.SIGTERM)})
        finally:
            print("cleaned up")
    """
    result = program(tmp_path, body)
    assert result.returncode == 128 + signal.SIGTERM
    assert result.stdout == "cleaned up\n"


def test_config_is_saved_and_the_end_is_announced(tmp_path: Path, capsys) -> None:
    _, loaded = parse("data", "--limit", "4")
    path = cli.save_config(loaded, tmp_path / "out")
    assert config.reload(path) == loaded
    cli.done(tmp_path, "python train.py")
    assert capsys.readouterr().out == f"output: {tmp_path}\nnext:   python train.py\n"


def test_dry_run_names_what_is_missing(tmp_path: Path, capsys) -> None:
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.touch()
    cli.plan(["step one"], [there])
    with pytest.raises(ValueError, match="absent"):
        cli.plan(["step one"], [there, absent])
    assert "would run: step one" in capsys.readouterr().out


def test_dry_run_takes_globs_and_hub_names(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "answers1.jsonl").write_text("{}")
    cli.plan(["step one"], [str(tmp_path / "answers[0-9].jsonl"), "some-owner/some-model"])
    assert "some-owner/some-model  (from the hub)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="missing input"):
        cli.plan(["step one"], ["models/no-such-model"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"models/smollm2 \(made by \./setup\.sh\)"):
        cli.plan(["step one"], ["models/smollm2"])


def test_sizes_are_checked_by_the_stage_that_reads_them() -> None:
    parse("data", "target.max_num_seqs=8")
    with pytest.raises(ValueError, match=r"bench\.loads"):
        parse("eval", "target.max_num_seqs=8")


def test_an_unusable_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(ValueError, match=rf"--out {out}: .*file is not a directory"):
            parse("data", "--out", str(out))
    parse("data", "--out", str(tmp_path / "new" / "sub"))
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(cli.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"--out .* is not writable"):
        parse("data", "--out", str(tmp_path / "new"))
