"""What the thin command-line programs share: flags, configuration, errors, closing lines.

A program looks like this::

    def main() -> None:
        args, config = cli.stage("train", __doc__, "target", "drafter", "limit", "max-steps",
                                 "out", "endpoint", "dry-run")
        from forespark.training import run  # heavy imports only after parsing

        out = run(config, ...)
        cli.save_config(config, out)
        cli.done(out, f"python calibrate.py --target {config.target.name}")

    if __name__ == "__main__":
        cli.run(main)

Flags become hydra overrides; any further ``key=value`` is an override of its own and wins
over the flags. Nothing here imports torch or vllm, so ``--help`` takes about a second.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forespark.config import Config

ROOT = Path(__file__).resolve().parent.parent
USER_ERROR = 2
OS_ERROR = 1
INTERRUPTED = 130
_OVERRIDE = re.compile(r"(?P<root>[+~]{0,2}[A-Za-z_]\w*)[\w.@/]*=")

# Flag -> argparse keywords. ``{stage}`` flags map to the stage's own section below.
_FLAGS: dict[str, dict[str, Any]] = {
    "target": {"default": "smollm2", "metavar": "NAME"},
    "arm": {"metavar": "NAME"},
    "bench": {"default": "decode", "metavar": "NAME"},
    "drafter": {
        "default": "forespark",
        "choices": ("forespark", "dspark"),
        "help": "which drafter (default: forespark)",
    },
    "drafter-dir": {
        "metavar": "DIR",
        "help": "checkpoint to use instead of this target's own (sets drafter.dir)",
    },
    "limit": {"type": int, "metavar": "N"},
    "max-steps": {"type": int, "metavar": "N", "help": "stop after N optimizer steps"},
    "source": {
        "action": "append",
        "metavar": "SOURCE",
        "help": "prompt source (starter, magpie, file:PATH, hub:NAME); repeatable",
    },
    "out": {"type": Path, "metavar": "DIR", "help": "write here instead of the default folder"},
    "endpoint": {
        "metavar": "URL",
        "help": "use this running OpenAI-compatible server instead of starting one",
    },
    "port": {"type": int, "metavar": "PORT", "help": "port to serve on (default: 8000)"},
    "trace": {
        "nargs": "?",
        "const": "",
        "metavar": "PATH",
        "help": "write one JSON line per engine step (default: RUN_DIR/traces/serve.jsonl)",
    },
    "dry-run": {"action": "store_true", "help": "check inputs and print the plan, run nothing"},
}
_LIMIT_HELP = {
    "data": "prompts in all",
    "train": "corpus rows",
    "heads": "corpus rows",
    "calibrate": "prompts per calibration run",
    "curves": "points per latency table",
    "eval": "prompts",
}


def stage(
    name: str,
    description: str | None,
    *flags: str,
    passthrough: bool = False,
    argv: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, Config]:
    """Parse the command line of one stage and compose its configuration.

    Args:
        name: Stage: ``data``, ``train``, ``heads``, ``calibrate``, ``curves``, ``serve``
            or ``eval``; its config section receives ``--limit``.
        description: Text of ``--help``.
        flags: Names out of ``_FLAGS`` (``"target"``, ``"dry-run"``, ...).
        passthrough: Collect unknown flags and their values in ``args.extra`` instead of
            failing (``serve.py`` hands them to ``vllm serve``).
        argv: Arguments; None reads ``sys.argv``.

    Returns:
        ``args`` with one attribute per flag (``dry_run``, ``max_steps``; None when not
        given) plus ``extra``, and the checked configuration.

    Raises:
        ValueError: unknown target, arm or bench, an unknown key, a value out of range.
        SystemExit: 0 after ``--help``, 2 after an unknown flag.
    """
    _use_environment()
    parser = _parser(name, description, flags)
    tokens = list(sys.argv[1:] if argv is None else argv)
    args, rest = parser.parse_known_args(tokens)
    overrides, extra = _split(rest)
    if extra and not passthrough:
        parser.error(f"unknown argument {extra[0]!r}; settings are given as key=value")
    args.extra = extra
    from forespark.config import check_stage, load

    if getattr(args, "out", None) is not None:
        _require_writable(args.out)
    config = load([*_flag_overrides(name, args), *overrides])
    check_stage(config, name)
    return args, config


def _require_writable(out: Path) -> None:
    """Refuse an ``--out`` that cannot become a folder of ours, before any work."""
    present = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not present.is_dir():
        raise ValueError(f"--out {out}: {present} is not a directory; choose another folder")
    if not os.access(present, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: {present} is not writable; choose another folder")


def run(main: Callable[[], int | None]) -> None:
    """Call ``main`` and exit: user errors become one line on stderr, not a traceback.

    Exit codes: 0, or what ``main`` returned; 2 for ValueError (bad input), 1 for OSError
    (disk, port, connection), 130 when interrupted. ``FORESPARK_TRACEBACK=1`` shows where
    an error came from. SIGTERM unwinds like an exception, so servers started by a stage
    are stopped in its ``finally``.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = main() or 0
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        code = INTERRUPTED
    except (ValueError, OSError) as error:
        if os.environ.get("FORESPARK_TRACEBACK") == "1":
            traceback.print_exc()
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"{Path(sys.argv[0]).name}: error: {text}", file=sys.stderr)
        code = USER_ERROR if isinstance(error, ValueError) else OS_ERROR
    sys.exit(code)


def save_config(config: Config, out: Path) -> Path:
    """Save the resolved configuration as ``out/config.yaml``; ``config.reload`` reads it."""
    from forespark.config import dump
    from forespark.record import write_text

    path = Path(out) / "config.yaml"
    write_text(path, dump(config))
    return path


def done(out: Path, next_command: str | None = None) -> None:
    """Print where the output is and what to run next."""
    print(f"output: {out}")
    if next_command:
        print(f"next:   {next_command}")


def _is_hub_name(name: str) -> bool:
    """``owner/name`` with no local folder ``owner``: a model that the hub is asked for."""
    from forespark.config import local_path

    owner, *rest = name.split("/")
    return len(rest) == 1 and not local_path(name) and not Path(owner).is_dir()


def plan(
    steps: Iterable[str], files: Iterable[str | Path] = (), config: Config | None = None
) -> None:
    """Answer ``--dry-run``: print what would run and check the files it needs.

    A file may be a glob pattern, or the hub name of a model. With ``config`` the memory that
    its target needs is looked at, too.

    Raises:
        ValueError: at least one needed file is missing, names each; or too little memory.
    """
    from forespark.memory import needs

    for step in steps:
        print(f"would run: {step}")
    if config is not None:
        print(*needs(config), sep="\n")
    missing = []
    for path in files:
        if _is_hub_name(str(path)):
            print(f"needs:     {path}  (from the hub)")
            continue
        exists = Path(path).exists() or bool(glob.glob(str(path)))
        print(f"needs:     {path}{'' if exists else '  (missing)'}")
        if not exists:
            made = Path(path) == Path("models/smollm2")
            missing.append(f"{path}{' (made by ./setup.sh)' if made else ''}")
    if missing:
        raise ValueError(
            f"missing input: {', '.join(missing)}; correct the path, or make it with the stage "
            "that writes it"
        )


def _use_environment() -> None:
    """Continue in the repository's own ``.venv`` when this Python lacks the packages."""
    if importlib.util.find_spec("hydra") and importlib.util.find_spec("omegaconf"):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [str(python), *sys.argv])
    raise ValueError("hydra-core is not installed in this Python; run ./setup.sh first")


def _parser(name: str, description: str | None, flags: Sequence[str]) -> argparse.ArgumentParser:
    from forespark.config import BENCHES, names

    helps = {
        "target": f"target model: {', '.join(names('target'))} (default: smollm2)",
        "arm": f"serving policy: {', '.join(names('arm'))}"
        + ("; several with commas" if name == "eval" else ""),
        "bench": f"benchmark: {', '.join(BENCHES)} (default: decode)",
        "limit": f"use at most N {_LIMIT_HELP.get(name, 'items')}",
    }
    parser = argparse.ArgumentParser(
        prog=f"{name}.py",
        description=description,
        epilog="Any key=value sets a configuration key, for example target.max_num_seqs=8.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in flags:
        keywords = {"help": helps.get(flag), **_FLAGS[flag]}
        parser.add_argument(f"--{flag}", **keywords)
    return parser


def _split(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split leftover tokens into hydra overrides and everything else, orders kept.

    Right after an unknown flag, ``key=value`` counts as an override only when its root
    is a section of ours: ``--foo a=b`` keeps ``a=b`` as the flag's value.
    """
    from forespark.config import section_names

    overrides: list[str] = []
    extra: list[str] = []
    for token in rest:
        match = _OVERRIDE.match(token)
        known = match is not None and match["root"].lstrip("+~") in section_names()
        after_flag = bool(extra)
        if match is not None and (known or not after_flag):
            overrides.append(token)
        else:
            extra.append(token)
    return overrides, extra


def _flag_overrides(name: str, args: argparse.Namespace) -> list[str]:
    """Hydra overrides for the flags that were given."""
    from forespark.config import BENCHES, names

    given = {key: value for key, value in vars(args).items() if value is not None}
    overrides = []
    if "target" in given:
        overrides.append(f"target={given['target']}")
    if "bench" in given and given["bench"] not in BENCHES:
        raise ValueError(f"unknown bench {given['bench']!r}: want one of {', '.join(BENCHES)}")
    if "arm" in given and name == "eval":
        arms = [arm.strip() for arm in given["arm"].split(",")]
        for arm in arms:
            if arm not in names("arm"):
                raise ValueError(f"unknown arm {arm!r}: want one of {', '.join(names('arm'))}")
            if arms.count(arm) > 1:
                raise ValueError(f"--arm: got {arm} more than once, want each arm once")
        overrides.append(f"bench.arms=[{','.join(arms)}]")
    elif "arm" in given:
        overrides.append(f"arm={given['arm']}")
    if "drafter_dir" in given:
        overrides.append(f"drafter.dir={_quote(given['drafter_dir'])}")
    if "limit" in given:
        section = {"heads": "train", "eval": "bench"}.get(name, name)
        overrides.append(f"{section}.limit={given['limit']}")
    if "max_steps" in given:
        overrides.append(f"train.max_steps={given['max_steps']}")
    if "source" in given:
        overrides.append(f"data.sources=[{','.join(map(_quote, given['source']))}]")
    if "port" in given:
        overrides.append(f"serve.port={given['port']}")
    if "trace" in given:
        path = _quote(given["trace"]) if given["trace"] else "${run_dir}/traces/serve.jsonl"
        overrides.append(f"serve.trace={path}")
    return overrides


def _quote(text: str) -> str:
    """Quote a value for hydra's override grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
