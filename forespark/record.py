"""Run provenance, atomic files and JSON-lines records, shared by every stage.

A stage's output is either whole or absent: files are written beside their final name
and renamed. JSON lines are appended and flushed one by one, so a killed stage loses at
most a torn last line, which ``read_jsonl`` drops.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

SCHEMA = 1
_PACKAGES = ("torch", "triton", "vllm", "speculators", "transformers", "numba", "numpy")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, creating parent folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. NaN and infinity are refused where they were measured."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file is missing, truncated or not JSON; names the file.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not valid JSON ({error}); the file is truncated or corrupt"
        ) from None


def append_jsonl(path: Path, value: Any) -> None:
    """Append one JSON line and flush it to the operating system."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(value, allow_nan=False, ensure_ascii=False)
    with path.open("ab+") as out:
        _mend_tail(out)
        out.write(line.encode("utf-8") + b"\n")


def _mend_tail(out: BinaryIO) -> None:
    """Drop a last line torn by a kill: appended to, it would spoil two lines."""
    end = out.seek(0, os.SEEK_END)
    if end == 0:
        return
    out.seek(end - 1)
    if out.read(1) == b"\n":
        return
    out.seek(0)
    tail = out.read().rpartition(b"\n")[2]
    try:
        json.loads(tail)
    except ValueError:
        out.truncate(end - len(tail))
    else:
        out.write(b"\n")  # whole, only its newline was lost


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; a torn last line is dropped.

    Raises:
        ValueError: any other line is not JSON; names file and line.
    """
    path = Path(path)
    rows: list[dict[str, Any]] = []
    # Split before decoding: a kill can tear a line inside a character.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if all(not later.strip() for later in lines[number:]):
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    return rows


def file_sha256(path: Path) -> str:
    """Hex digest of one file's bytes."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as source:
        for block in iter(lambda: source.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def device_name() -> str:
    """Name of what computes: the CUDA device, or the processor and its thread count."""
    if Path("/dev/nvidiactl").exists():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"cpu: {model} x{len(os.sched_getaffinity(0))}"


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(*args: str) -> str | None:
    root = Path(__file__).resolve().parent
    try:
        return subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def provenance() -> dict[str, Any]:
    """Who made this file: commit, whether the tree was dirty, argv, versions, device."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "device": device_name(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
