"""Limits of configuration values, and the names that a configuration may choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIG_DIR = Path(__file__).resolve().parent.parent.parent / "configs"


def require(ok: bool, what: str, got: Any, want: str) -> None:
    if not ok:
        raise ValueError(f"{what}: got {got!r}, want {want}")


def require_least(section: str, settings: Any, least: int, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        require(value >= least, f"{section}.{key}", value, f">= {least}")


def require_positive(section: str, settings: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        require(value > 0, f"{section}.{key}", value, "> 0")


def require_limit(section: str, limit: int | None) -> None:
    require(limit is None or limit >= 1, f"{section}.limit (--limit)", limit, ">= 1 or unset")


def names(group: str) -> list[str]:
    """Names of the YAML files of one config group, sorted."""
    return sorted(p.stem for p in (CONFIG_DIR / group).glob("*.yaml"))
