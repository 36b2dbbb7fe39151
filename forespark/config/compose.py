"""Compose, check, write and read a whole configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from omegaconf import MISSING, DictConfig, OmegaConf

from forespark.config.checks import CONFIG_DIR, names, require
from forespark.config.engine import (
    ArmConfig,
    DrafterConfig,
    ScheduleConfig,
    ServeConfig,
    TargetConfig,
)
from forespark.config.loops import SloConfig, StreamConfig
from forespark.config.stages import (
    BenchConfig,
    CalibrateConfig,
    CurvesConfig,
    DataConfig,
    TrainConfig,
)


@dataclass
class Config:
    target: TargetConfig = field(default_factory=TargetConfig)
    arm: ArmConfig = field(default_factory=ArmConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    curves: CurvesConfig = field(default_factory=CurvesConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    run_dir: str = MISSING  # where this target's stages read and write
    seed: int = 0


def local_path(name: str) -> bool:
    """True when a model's name is a folder's, never a hub's, whether or not it exists."""
    first = Path(name).parts[:1]
    return (
        Path(name).is_absolute()
        or first in ((), ("models",), ("runs",), ("..",))
        or (name.startswith("./") or Path(name).is_dir())
    )


def require_model(model: str) -> None:
    """Refuse the name of a folder that does not exist, before a hub is asked for it.

    Raises:
        ValueError: says how to make the folder, or which setting to correct.
    """
    if local_path(model) and not Path(model).is_dir():
        embedded = Path(model).parts[-2:] == ("models", "smollm2")
        advice = "run ./setup.sh" if embedded else "correct target.model"
        raise ValueError(f"{model}: no such directory; {advice}")


def drafter_places(config: Config, name: str) -> list[Path]:
    """Folders where a drafter's checkpoint may lie, the first that holds one counts.

    ``drafter.dir`` alone when it is set; else this run's ``drafters/<name>``, then the one
    shipped as ``models/<target>-<name>``.
    """
    if config.drafter.dir is not None:
        return [Path(config.drafter.dir)]
    shipped = CONFIG_DIR.parent / "models" / f"{config.target.name}-{name}"
    return [Path(config.run_dir) / "drafters" / name, shipped]


def check_stage(config: Config, stage: str) -> None:
    """Check what a stage needs of several sections together.

    Other stages may shrink ``target`` without touching the sizes of this one.

    Raises:
        ValueError: a load, batch or context that the target's engine cannot hold.
    """
    target, curves = config.target, config.curves
    sizes = {"eval": ("bench.loads", config.bench.loads)}
    sizes["curves"] = ("curves.batch_sizes", curves.batch_sizes)
    if config.calibrate.caps:
        loads = config.calibrate.cap_loads or config.calibrate.pre_loads
        sizes["calibrate"] = ("calibrate.cap_loads", loads)
    stream = config.stream
    if stage == "eval" and stream.loads:
        most = target.max_num_seqs
        fits = max(stream.loads) <= most
        require(fits, "stream.loads", stream.loads, f"none above target.max_num_seqs, {most}")
    if stage in sizes:
        key, values = sizes[stage]
        most = target.max_num_seqs
        want = f"at least one, none above target.max_num_seqs, which is {most}"
        require(bool(values) and max(values) <= most, key, values, want)
    if stage == "curves":
        want = f"less than target.max_model_len, which is {target.max_model_len}"
        fits = curves.context_len < target.max_model_len
        require(fits, "curves.context_len", curves.context_len, want)


def load(overrides: list[str]) -> Config:
    """Compose ``configs/config.yaml`` with hydra overrides and validate it.

    Args:
        overrides: hydra overrides such as ``target=smollm2`` or ``train.lr=1e-3``.

    Raises:
        ValueError: an unknown group choice, key, type or an out-of-range value; the
            message says what was got and what is allowed.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        group, _, choice = override.partition("=")
        if group in ("target", "arm") and choice not in names(group):
            raise ValueError(f"unknown {group} {choice!r}: want one of {', '.join(names(group))}")
    ConfigStore.instance().store(name="config_schema", node=Config)
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            tree = compose("config", overrides=overrides)
        return typed(tree)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"bad configuration: {_reason(error)}") from error


def _keys(section: str) -> list[str]:
    """Keys of one section; those of the whole configuration for the empty name."""
    kinds = {f.name: f.default_factory for f in fields(Config)}
    return [f.name for f in fields(kinds[section] if section else Config)]  # type: ignore[arg-type]


def _unknown_key(key: str) -> str:
    section = key.rpartition(".")[0]
    return f"unknown key {key}: want one of {', '.join(_keys(section))}"


def _reason(error: Exception) -> str:
    """One line with the full key, of an error of hydra or OmegaConf."""
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None) or getattr(cause, "override", None) or ""
    known = [*section_names(), ""]
    unknown = isinstance(cause, (ConfigAttributeError, ConfigKeyError))
    if unknown and key and str(key).rpartition(".")[0] in known:
        return _unknown_key(str(key))
    text = str(cause).splitlines()[0]
    return text if not key or str(key) in text else f"{key}: {text}"


def _refuse_added_keys(tree: DictConfig) -> None:
    """``+key=value`` writes any key into the tree, and the dataclasses would carry it along."""
    for section in tree:
        if section not in _keys(""):
            raise ValueError(_unknown_key(str(section)))
        if section in ("run_dir", "seed"):
            continue
        for key in tree[section]:
            if key not in _keys(str(section)):
                raise ValueError(_unknown_key(f"{section}.{key}"))


def typed(tree: DictConfig) -> Config:
    """Turn a composed tree into dataclasses; ``__post_init__`` checks the limits."""
    _refuse_added_keys(tree)
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


def dump(config: Config) -> str:
    """YAML text that ``reload`` reads back to an equal ``Config``."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def reload(path: Path) -> Config:
    """Read a ``config.yaml`` written by ``dump``.

    Raises:
        ValueError: the file has keys or types this version does not know.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        return typed(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {_reason(error)}") from error


def section_names() -> list[str]:
    return [f.name for f in fields(Config)]
