"""Where an arm's files are, and whether they belong together.

Checked before an engine starts, without importing torch or vllm: a missing or foreign
file costs seconds, and the message names the command that makes it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from forespark import record
from forespark.config import Config

HEADS = Path("forespark")  # beside the checkpoint, never inside it


@dataclass(frozen=True)
class Artifacts:
    """Files of one arm; None where the arm needs none."""

    drafter: Path | None = None
    drafter_sha256: str | None = None
    heads: Path | None = None
    calibration: Path | None = None
    latency: Path | None = None


def drafter_dir(config: Config, name: str) -> Path:
    """Checkpoint directory of a drafter.

    Order: ``drafter.dir``, then this run's ``drafters/<name>``, then the one shipped as
    ``models/<target>-<name>``.

    Raises:
        ValueError: none of them holds a checkpoint.
    """
    root = Path(__file__).resolve().parents[2]
    if config.drafter.dir is not None:
        places = [Path(config.drafter.dir)]
    else:
        places = [
            Path(config.run_dir) / "drafters" / name,
            root / "models" / f"{config.target.name}-{name}",
        ]
    for place in places:
        if (place / "model.safetensors").is_file() and (place / "config.json").is_file():
            return place
    raise ValueError(
        f"no {name} drafter for target {config.target.name} in "
        f"{' or '.join(str(p) for p in places)}: run "
        f"`python train.py --target {config.target.name} --drafter {name}`"
    )


@lru_cache(maxsize=8)
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    return record.file_sha256(path)


def drafter_sha256(drafter: Path) -> str:
    """Digest of the checkpoint's weights: the key that ties files to a drafter."""
    weights = drafter / "model.safetensors"
    stat = weights.stat()
    return _sha256(weights, stat.st_size, stat.st_mtime_ns)


def calibration_key(config: Config, name: str, digest: str | None = None) -> dict[str, Any]:
    """What ties traces and a calibration to a drafter (CALIBRATION_KEY of ``fore_d``)."""
    return {
        "target": config.target.name,
        "drafter": name,
        "drafter_sha256": digest or drafter_sha256(drafter_dir(config, name)),
        "K": config.drafter.num_speculative_tokens,
    }


def latency_key(config: Config, digest: str | None = None) -> dict[str, Any]:
    """What latency tables are valid for (LATENCY_KEY of ``fore_d.costs``).

    Args:
        digest: of the drafter's weights; None looks the drafter up.
    """
    return {
        "target": config.target.name,
        "drafter_sha256": digest or drafter_sha256(drafter_dir(config, "forespark")),
        "device": record.device_name(),
        "tensor_parallel_size": config.target.tensor_parallel_size,
        "K": config.drafter.num_speculative_tokens,
        "max_num_seqs": config.target.max_num_seqs,
        "dtype": config.target.dtype,
        "vllm": record.versions().get("vllm", "unknown"),
    }


def check_safetensors(path: Path) -> None:
    """Refuse a truncated or corrupt safetensors file by its header and length.

    Raises:
        ValueError: the file is shorter than its header says, or has no header.
    """
    size = path.stat().st_size
    with path.open("rb") as source:
        head = source.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= size - 8:
            raise ValueError(f"{path}: corrupt checkpoint (no safetensors header); copy it again")
        try:
            header: dict[str, Any] = json.loads(source.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path}: corrupt checkpoint (unreadable header)") from None
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    if max(ends, default=0) + 8 + length != size:
        raise ValueError(
            f"{path}: truncated checkpoint: {size} bytes, header wants "
            f"{max(ends, default=0) + 8 + length}; copy or train it again"
        )


def _check_drafter(config: Config, drafter: Path, name: str) -> None:
    check_safetensors(drafter / "model.safetensors")
    settings = record.read_json(drafter / "config.json")
    block = settings.get("block_size")
    if isinstance(block, int):
        # DFlash 2's block holds the anchor too, DSpark's does not.
        limit = block if name == "dspark" else block - 1
        if config.drafter.num_speculative_tokens > limit:
            raise ValueError(
                f"drafter.num_speculative_tokens: got K={config.drafter.num_speculative_tokens}, "
                f"but {drafter} was trained for at most {limit} draft tokens a block"
            )
    heads = drafter / HEADS / "heads.json"
    if name == "forespark" and heads.is_file():
        made_for = record.read_json(heads).get("target")
        if made_for != config.target.name:
            raise ValueError(
                f"{drafter} was trained for target {made_for!r}, not {config.target.name!r}: "
                f"run `python train.py --target {config.target.name} --drafter {name}`"
            )


def _first(places: list[Path], what: str, command: str) -> Path:
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"no {what} in {' or '.join(str(p) for p in places)}: run `{command}`")


def calibration_name(drafter: str) -> str:
    """File name of a drafter's calibration in a run folder."""
    return "calibration.json" if drafter == "forespark" else f"calibration-{drafter}.json"


def _calibration(config: Config, drafter: Path, digest: str, name: str) -> Path:
    """This run's calibration when it is for this drafter, else the one beside it."""
    own = Path(config.run_dir) / calibration_name(name)
    if own.is_file():
        key = record.read_json(own).get("key", {})
        if key.get("drafter_sha256") == digest:
            return own
    return _first(
        [drafter / HEADS / "calibration.json"],
        f"calibration of {drafter}",
        f"python calibrate.py --target {config.target.name} --drafter {name}",
    )


def resolve(config: Config, *, tables: bool = True, calibration: bool = True) -> Artifacts:
    """Find and check what ``config.arm`` needs.

    Args:
        tables: the arm will plan, so latency tables are needed.
        calibration: calibrated probabilities are needed (not while calibrating).

    Raises:
        ValueError: something is missing, corrupt or made for something else.
    """
    arm = config.arm
    if not Path(config.target.model).exists() and "/" not in config.target.model.strip("./"):
        raise ValueError(f"target model {config.target.model}: no such directory; run ./setup.sh")
    if arm.drafter == "none":
        return Artifacts()
    drafter = drafter_dir(config, arm.drafter)
    _check_drafter(config, drafter, arm.drafter)
    digest = drafter_sha256(drafter)
    forced = config.serve.force_length is not None
    if forced and arm.drafter != "forespark":
        raise ValueError(
            "serve.force_length: only the forespark drafter drafts other lengths than K"
        )
    if arm.draft == "planned" and arm.verify == "full" and not forced:
        raise ValueError("arm.verify: got full with planned drafts, want adaptive")
    if arm.draft == "full" and arm.verify == "full" and not forced:
        return Artifacts(drafter=drafter, drafter_sha256=digest)
    fitted = _calibration(config, drafter, digest, arm.drafter) if calibration else None
    if arm.drafter == "dspark":
        return Artifacts(drafter=drafter, drafter_sha256=digest, calibration=fitted)
    heads = _first(
        [drafter / HEADS / "heads.safetensors"],
        f"estimator heads of {drafter}",
        f"python train.py --target {config.target.name}",
    ).parent
    return Artifacts(
        drafter=drafter,
        drafter_sha256=digest,
        heads=heads,
        calibration=fitted,
        latency=_first(
            [Path(config.run_dir) / "latency.json"],
            "latency tables",
            f"python curves.py --target {config.target.name}",
        )
        if tables
        else None,
    )
