"""Where an arm's files are, and whether they belong together.

Checked before an engine starts, without importing vllm: a missing, foreign or damaged
file costs seconds, and the message names the command that makes it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from forespark import record
from forespark.config import Config, drafter_places, load, require_model
from forespark.serving.caps import COMMAND, cap_ranges

HEADS = Path("forespark")  # beside the checkpoint, never inside it


@dataclass(frozen=True)
class Artifacts:
    """Files of one arm; None where the arm needs none."""

    drafter: Path | None = None
    drafter_sha256: str | None = None
    heads: Path | None = None
    calibration: Path | None = None
    latency: Path | None = None
    caps: Path | None = None


def drafter_dir(config: Config, name: str) -> Path:
    """Checkpoint directory of a drafter.

    Raises:
        ValueError: none of ``drafter_places`` holds a checkpoint.
    """
    places = drafter_places(config, name)
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


def latency_key(
    config: Config, digest: str | None = None, name: str = "forespark"
) -> dict[str, Any]:
    """What latency tables are valid for (LATENCY_KEY of ``fore_d.costs``).

    Args:
        digest: of the drafter's weights; None looks the drafter ``name`` up.
    """
    return {
        "target": config.target.name,
        "drafter_sha256": digest or drafter_sha256(drafter_dir(config, name)),
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
            ends = [int(entry["data_offsets"][1]) for key, entry in header.items()
                    if key != "__metadata__"]  # fmt: skip
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            raise ValueError(f"{path}: corrupt checkpoint (unreadable header)") from None
    if max(ends, default=0) + 8 + length != size:
        raise ValueError(
            f"{path}: truncated checkpoint: {size} bytes, header wants "
            f"{max(ends, default=0) + 8 + length}; copy or train it again"
        )


def _check_drafter(config: Config, drafter: Path, name: str) -> None:
    check_safetensors(drafter / "model.safetensors")
    settings = _read_object(drafter / "config.json")
    block = settings.get("block_size")
    if isinstance(block, int):
        # DFlash 2's block holds the anchor too, DSpark's does not unless it is directional.
        limit = block if settings.get("sample_from_anchor", False) else block - 1
        if config.drafter.num_speculative_tokens > limit:
            raise ValueError(
                f"drafter.num_speculative_tokens: got K={config.drafter.num_speculative_tokens}, "
                f"but {drafter} was trained for at most {limit} draft tokens a block"
            )
    heads = drafter / HEADS / "heads.json"
    if heads.is_file():
        made_for = _read_object(heads).get("target")
        if made_for != config.target.name:
            raise ValueError(
                f"{drafter} was trained for target {made_for!r}, not {config.target.name!r}: "
                f"run `python train.py --target {config.target.name} --drafter {name}`"
            )


def calibration_name(drafter: str) -> str:
    """File name of a drafter's calibration in a run folder."""
    return "calibration.json" if drafter == "forespark" else f"calibration-{drafter}.json"


def latency_name(drafter: str) -> str:
    """File name of the latency tables of a drafter in a run folder."""
    return "latency.json" if drafter == "forespark" else f"latency-{drafter}.json"


def _calibration(config: Config, drafter: Path, digest: str, name: str) -> Path:
    """This run's calibration when it is for this drafter, else the one beside it."""
    own = Path(config.run_dir) / calibration_name(name)
    if own.is_file():
        key = _read_object(own).get("key")
        if isinstance(key, dict) and key.get("drafter_sha256") == digest:
            return own
    shipped = drafter / HEADS / "calibration.json"
    if shipped.is_file():
        return shipped
    foreign = f" ({own} belongs to another drafter)" if own.is_file() else ""
    raise ValueError(
        f"no calibration of {drafter} in {own}{foreign} or {shipped}: run "
        f"`python calibrate.py --target {config.target.name} --drafter {name}`"
    )


def _read_object(path: Path) -> dict[str, Any]:
    found = record.read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got a JSON {type(found).__name__}, want an object; "
                         "the file is damaged, make or copy it again")  # fmt: skip
    return found


def _check_calibration(config: Config, path: Path, digest: str, name: str) -> None:
    from forespark.fore_d.calibrated import Calibration

    Calibration.from_record(_read_object(path), calibration_key(config, name, digest), str(path))


def _check_latency(config: Config, path: Path, digest: str) -> None:
    from forespark.fore_d.costs import CostTables

    CostTables.from_record(_read_object(path), latency_key(config, digest), str(path))


def _caps(config: Config, digest: str) -> Path:
    """This run's caps of a batch-wise arm."""
    path = Path(config.run_dir) / "caps.json"
    if not path.is_file():
        command = COMMAND.format(arm=config.arm.name)
        raise ValueError(
            f"no batch-wise caps in {path}: run `{command} --target {config.target.name}`"
        )
    cap_ranges(_read_object(path), config.arm.name, latency_key(config, digest), str(path))
    return path


def _heads(config: Config, drafter: Path, digest: str) -> Path:
    """Folder of the estimators that were trained with exactly these weights."""
    folder = drafter / HEADS
    command = f"`python train.py --target {config.target.name}`"
    if config.arm.drafter == "dspark":  # the usual one has no pre-draft estimator
        command = command[:-1] + " --drafter dspark drafter.directional=true`"
    for name in ("heads.safetensors", "heads.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no estimator heads of {drafter} in {folder / name}: run {command}")
    check_safetensors(folder / "heads.safetensors")
    if _read_object(folder / "heads.json").get("drafter_sha256") != digest:
        raise ValueError(f"{folder}: estimator heads of other weights than {drafter} holds; "
                         f"copy the folder as a whole, or run {command}")  # fmt: skip
    return folder


def resolve(config: Config, *, tables: bool = True, calibration: bool = True) -> Artifacts:
    """Find and check what ``config.arm`` needs.

    Args:
        tables: latency tables are needed if the arm plans (False while profiling).
        calibration: what calibration leaves behind is needed (False while calibrating).

    Raises:
        ValueError: something is missing, corrupt or made for something else.
    """
    arm = config.arm
    require_model(config.target.model)
    if arm.drafter == "none":
        return Artifacts()
    drafter = drafter_dir(config, arm.drafter)
    _check_drafter(config, drafter, arm.drafter)
    digest = drafter_sha256(drafter)
    length, K = config.serve.force_length, config.drafter.num_speculative_tokens
    forced = length is not None
    if forced and arm.drafter == "dspark" and arm.draft != "planned":
        raise ValueError(
            "serve.force_length: this arm always drafts K tokens; planning arms draft others"
        )
    if length is not None and length > K:
        raise ValueError(f"serve.force_length: got {length}, want at most K={K}")
    if arm.search == "exhaustive":
        from forespark.serving.exhaustive import check_arm

        check_arm(config.target.max_num_seqs, K, config.target.tensor_parallel_size)
    if arm.draft == "planned" and arm.verify == "full" and not forced:
        raise ValueError("arm.verify: got full with planned drafts, want adaptive")
    if config.serve.min_draft > K:
        raise ValueError(f"serve.min_draft: got {config.serve.min_draft}, want at most K={K}")
    capped = "capped" in (arm.draft, arm.verify) and not forced
    caps = _caps(config, digest) if capped and calibration else None
    if arm.draft == "full" and arm.verify in ("full", "capped") and not forced:
        return Artifacts(drafter=drafter, drafter_sha256=digest, caps=caps)
    if arm.verify != "adaptive":
        # Full verification asks neither how likely a draft is nor what it costs.
        heads = _heads(config, drafter, digest)
        return Artifacts(drafter=drafter, drafter_sha256=digest, heads=heads, caps=caps)
    fitted = _calibration(config, drafter, digest, arm.drafter) if calibration else None
    if fitted is not None:
        _check_calibration(config, fitted, digest, arm.drafter)
    if arm.drafter == "dspark" and arm.draft != "planned":
        return Artifacts(drafter=drafter, drafter_sha256=digest, calibration=fitted)
    heads = _heads(config, drafter, digest)
    latency = Path(config.run_dir) / latency_name(arm.drafter) if tables else None
    if latency is not None:
        if not latency.is_file():
            flag = "" if arm.drafter == "forespark" else f" --drafter {arm.drafter}"
            raise ValueError(
                f"no latency tables in {latency}: run `python curves.py --target "
                f"{config.target.name}{flag}`"
            )
        _check_latency(config, latency, digest)
    return Artifacts(drafter, digest, heads, fitted, latency)


def check_arms(config: Config, names: list[str]) -> None:
    """Find every file that arms need before the first server starts; ValueError names all."""
    problems = []
    for name in names:
        arm = load([f"target={config.target.name}", f"arm={name}"]).arm
        try:
            resolve(replace(config, arm=arm))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
