"""Typed configuration of every stage, composed by hydra and checked before any work.

One ``Config`` describes a run. ``configs/config.yaml`` names a target and an arm; each
``configs/target/<name>.yaml`` scales every stage for that target, so numbers that
differ between a 2-core CPU and eight GPUs live in YAML and never in code. Dataclasses
stay unfrozen because hydra's overrides write into them; limits are checked in
``__post_init__`` when ``load`` turns the composed tree into objects.
"""

from forespark.config.checks import CONFIG_DIR, names
from forespark.config.compose import (
    Config,
    check_stage,
    drafter_places,
    dump,
    load,
    local_path,
    reload,
    require_model,
    section_names,
)
from forespark.config.engine import (
    ArmConfig,
    DrafterConfig,
    ScheduleConfig,
    ServeConfig,
    TargetConfig,
)
from forespark.config.loops import SloConfig, StreamConfig
from forespark.config.stages import (
    BENCHES,
    BenchConfig,
    CalibrateConfig,
    CurvesConfig,
    DataConfig,
    TrainConfig,
)

__all__ = [
    "BENCHES",
    "CONFIG_DIR",
    "ArmConfig",
    "BenchConfig",
    "CalibrateConfig",
    "Config",
    "CurvesConfig",
    "DataConfig",
    "DrafterConfig",
    "ScheduleConfig",
    "ServeConfig",
    "SloConfig",
    "StreamConfig",
    "TargetConfig",
    "TrainConfig",
    "check_stage",
    "drafter_places",
    "dump",
    "load",
    "local_path",
    "names",
    "reload",
    "require_model",
    "section_names",
]
