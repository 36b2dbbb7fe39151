"""Typed configuration of every stage, composed by hydra and checked before any work.

One ``Config`` describes a run. ``configs/config.yaml`` names a target and an arm; each
``configs/target/<name>.yaml`` scales every stage for that target, so numbers that
differ between a 2-core CPU and eight GPUs live in YAML and never in code. Dataclasses
stay unfrozen because hydra's overrides write into them; limits are checked in
``__post_init__`` when ``load`` turns the composed tree into objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"

DRAFTERS = ("none", "forespark", "dspark")
DRAFT_RULES = ("none", "full", "planned")
VERIFY_RULES = ("none", "full", "adaptive")
BENCHES = ("decode",)  # what eval.py --bench knows


def _require(ok: bool, what: str, got: Any, want: str) -> None:
    if not ok:
        raise ValueError(f"{what}: got {got!r}, want {want}")


def _require_least(section: str, settings: Any, least: int, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        _require(value >= least, f"{section}.{key}", value, f">= {least}")


def _require_positive(section: str, settings: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        _require(value > 0, f"{section}.{key}", value, "> 0")


def _require_limit(section: str, limit: int | None) -> None:
    _require(limit is None or limit >= 1, f"{section}.limit (--limit)", limit, ">= 1 or unset")


@dataclass
class TargetConfig:
    """The target model and how an engine holds it."""

    name: str = MISSING
    model: str = MISSING  # directory or hub name of the target checkpoint
    # Layers whose hidden states feed the drafter, in speculators' numbering
    # (``--target-layer-ids``): id i is the output of decoder layer i.
    target_layer_ids: list[int] = field(default_factory=list)
    dtype: str = "auto"
    max_model_len: int = 8192  # tokens
    max_num_seqs: int = 512  # requests
    max_num_batched_tokens: int = 24576  # tokens per step
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    kv_cache_dtype: str = "auto"
    cpu_kv_cache_gib: int = 4  # CPU only: VLLM_CPU_KVCACHE_SPACE
    cudagraph_max_tokens: int = 8192
    # Reasoning of the chat template: "off", "low", ...; None when the template has no switch.
    thinking: str | None = None
    sparse_mla: bool = False  # kernels need lengths on the host: forces the host split
    serve_args: list[str] = field(default_factory=list)  # passed to ``vllm serve``

    def __post_init__(self) -> None:
        counts = ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size")
        _require_least("target", self, 1, *counts)
        _require(self.max_model_len >= 16, "target.max_model_len", self.max_model_len, ">= 16")


@dataclass
class ArmConfig:
    """One serving policy: who drafts, how much, and how much is verified."""

    name: str = MISSING
    drafter: str = "none"  # none | forespark | dspark
    draft: str = "none"  # none | full (K tokens) | planned (joint schedule)
    verify: str = "none"  # none | full | adaptive
    curve: str = "triangle"  # triangle | single: which pre-draft rows are read

    def __post_init__(self) -> None:
        _require(self.drafter in DRAFTERS, "arm.drafter", self.drafter, f"one of {DRAFTERS}")
        _require(self.draft in DRAFT_RULES, "arm.draft", self.draft, f"one of {DRAFT_RULES}")
        _require(self.verify in VERIFY_RULES, "arm.verify", self.verify, f"one of {VERIFY_RULES}")
        drafts = self.drafter != "none"
        _require(
            (self.draft != "none") == drafts and (self.verify != "none") == drafts,
            "arm.draft and arm.verify",
            (self.draft, self.verify),
            "none and none without a drafter, something else with one",
        )
        _require(
            self.draft != "planned" or self.drafter == "forespark",
            "arm.draft",
            self.draft,
            "full: only the forespark drafter has a pre-draft estimator to plan with",
        )
        _require(
            self.curve in ("triangle", "single"), "arm.curve", self.curve, "triangle or single"
        )


@dataclass
class DrafterConfig:
    """Shape of the drafters. K draft tokens are proposed at most."""

    num_speculative_tokens: int = 15  # K; DFlash 2's block_size is K + 1
    num_layers: int = 5
    selector_rank: int = 256
    selector_top_k: int = 16
    estimator_rank: int = 256  # r of Eq. (2)
    # Token whose target embedding fills the masked slots; None: the tokenizer's mask token,
    # an unused vocabulary row, or its padding token.
    mask_token_id: int | None = None
    init: str = "random"  # random | target (copies of the target's last layers)
    # Checkpoint to use; None looks in <run_dir>/drafters/<name>, then models/<target>-<name>.
    dir: str | None = None
    directional: bool = False  # causal blocks; the estimator then has row K only

    def __post_init__(self) -> None:
        _require(
            1 <= self.num_speculative_tokens <= 63,
            "drafter.num_speculative_tokens",
            self.num_speculative_tokens,
            "1..63",
        )
        _require(self.init in ("random", "target"), "drafter.init", self.init, "random or target")
        _require(self.num_layers >= 1, "drafter.num_layers", self.num_layers, ">= 1")


@dataclass
class DataConfig:
    """Corpus: prompts, the target's answers, tokens."""

    sources: list[str] = field(default_factory=lambda: ["starter"])
    # Prompts that must not be trained on (normalized and exact match), as sources.
    exclude: list[str] = field(default_factory=lambda: ["starter:bench", "starter:calibration"])
    limit: int | None = None  # prompts in all; None means every one
    magpie_rows: int = 0  # user turns the target writes itself when "magpie" is a source
    magpie_temperature: float = 1.0
    max_tokens: int = 8192  # answer tokens per turn
    max_prompt_tokens: int = 4096
    temperature: float = 0.0
    top_p: float = 1.0
    concurrency: int = 64
    keep_truncated: bool = False  # keep answers cut at max_tokens (counted either way)
    seed: int = 0

    def __post_init__(self) -> None:
        _require_limit("data", self.limit)
        _require(bool(self.sources), "data.sources", self.sources, "at least one source")
        _require_least("data", self, 1, "max_tokens", "max_prompt_tokens", "concurrency")
        _require_least("data", self, 0, "magpie_rows", "magpie_temperature", "temperature")
        _require(0.0 < self.top_p <= 1.0, "data.top_p", self.top_p, "in (0, 1]")


@dataclass
class TrainConfig:
    """Online training (paper, Section 4.5 and Appendix A)."""

    epochs: int = 3
    limit: int | None = None  # corpus rows; None means every one
    max_steps: int | None = None
    lr: float = 6e-4
    dspark_lr: float = 3e-4
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04
    total_seq_len: int = 8192  # tokens per packed row
    max_anchors: int = 3072  # per packed row
    redraft_every: int = 4  # anchors re-drafted at length d < K: every fourth
    lambda_pre: float = 1.0
    lambda_post: float = 1.0
    ce_weight: float = 0.1
    tv_weight: float = 0.9
    # First steps with cross-entropy alone: total variation has next to no gradient while
    # draft and target do not overlap, and Adam and Muon scale up what noise is left of it.
    ce_warmup_steps: int = 0
    position_decay: float | None = None  # gamma of the position weights; None: library default
    # Vocabulary rows of the training loss: None is all; N keeps the corpus's N most
    # frequent tokens, the step's own tokens and ``loss_vocab_samples`` random others that
    # stand for the rest in both softmaxes. The serving head always stays full, and
    # validation always uses all rows.
    loss_vocab: int | None = None
    loss_vocab_samples: int = 2048
    schedule: str = "cosine"  # cosine | wsd (constant, then linear to zero)
    decay_fraction: float = 0.25  # wsd: last part of the run
    max_minutes: float | None = None  # wall clock over all sessions of a run; also ends it
    data: list[str] = field(default_factory=list)  # corpus folders or JSONL; [] is run_dir/corpus
    validation_rows: int = 64  # held-out corpus rows per validation
    validation_anchors: int = 48  # per held-out row
    validation_fraction: float = 0.05
    validate_every: int = 500  # steps
    checkpoint_every: int = 500  # steps
    optimizer: str = "adamw"  # adamw | muon (float32 Newton-Schulz for matrices)
    muon_lr: float = 2e-3
    logger: str = "tensorboard"  # tensorboard | wandb
    attn_impl: str = "simple_flex_attention"
    hidden_states: str = "server"  # server (vLLM, started or --endpoint) | local (in process)
    cache_hidden_states: bool = True  # keep each row's states on disk after first use
    seed: int = 0

    def __post_init__(self) -> None:
        _require_limit("train", self.limit)
        _require_least("train", self, 1, "epochs", "total_seq_len", "max_anchors")
        _require_least("train", self, 1, "validate_every", "checkpoint_every")
        _require_positive("train", self, "lr", "dspark_lr", "muon_lr")
        _require(
            self.max_steps is None or self.max_steps >= 1,
            "train.max_steps (--max-steps)",
            self.max_steps,
            ">= 1 or unset",
        )
        _require(
            self.optimizer in ("adamw", "muon"), "train.optimizer", self.optimizer, "adamw or muon"
        )
        _require(
            self.schedule in ("cosine", "wsd"), "train.schedule", self.schedule, "cosine or wsd"
        )
        _require(
            self.hidden_states in ("server", "local"),
            "train.hidden_states",
            self.hidden_states,
            "server or local",
        )
        _require(
            0.0 < self.decay_fraction <= 1.0,
            "train.decay_fraction",
            self.decay_fraction,
            "in (0, 1]",
        )
        _require(
            self.logger in ("tensorboard", "wandb"),
            "train.logger",
            self.logger,
            "tensorboard or wandb",
        )


@dataclass
class CalibrateConfig:
    """Calibration runs (paper, Appendix B)."""

    sources: list[str] = field(default_factory=lambda: ["starter:calibration"])
    limit: int | None = None  # prompts per run at most; None means the counts below
    post_prompts: int = 1000
    pre_prompts: int = 4000
    max_tokens: int = 256
    post_load: int = 16  # requests in flight
    pre_loads: list[int] = field(default_factory=lambda: [1, 8, 32, 64, 128, 256, 512])
    bins: int = 15
    theta_grid: int = 41  # log-spaced in [0.1, 10]
    min_samples: int = 50  # a cell with fewer keeps scale 1 and a shrunken bias

    def __post_init__(self) -> None:
        _require_limit("calibrate", self.limit)
        _require_least("calibrate", self, 1, "max_tokens", "post_load", "bins", "theta_grid")
        _require(
            bool(self.pre_loads) and all(load >= 1 for load in self.pre_loads),
            "calibrate.pre_loads",
            self.pre_loads,
            "at least one number of requests, all >= 1",
        )


@dataclass
class CurvesConfig:
    """Latency profiling."""

    batch_sizes: list[int] = field(default_factory=list)
    verified_per_request: list[int] = field(default_factory=list)  # draft tokens
    steps_per_point: int = 30
    context_len: int = 256  # tokens already cached per request
    limit: int | None = None  # points per table at most, spread over the range

    def __post_init__(self) -> None:
        _require_limit("curves", self.limit)
        _require_least("curves", self, 1, "steps_per_point", "context_len")
        _require(
            all(size >= 1 for size in self.batch_sizes),
            "curves.batch_sizes",
            self.batch_sizes,
            "requests, all >= 1",
        )


@dataclass
class ScheduleConfig:
    """The joint schedule (Section 4.3)."""

    price_other: bool = True  # False: the literal denominator of Eq. (4)
    # Survival of draft positions 1..K used before any estimate exists.
    prior_acceptance: float = 0.6

    def __post_init__(self) -> None:
        prior = self.prior_acceptance
        _require(0.0 < prior < 1.0, "schedule.prior_acceptance", prior, "between 0 and 1")


@dataclass
class ServeConfig:
    """Server and engine switches."""

    host: str = "127.0.0.1"
    port: int = 8000
    split: str = "device"  # device | host
    trace: str | None = None  # path: one JSON line per step
    trace_detail: bool = False  # also each request's lengths, logits and acceptance
    force_length: int | None = None  # calibration: draft exactly d tokens, verify all
    ready_timeout_s: float = 600.0
    barrier: int | None = None  # hold decoding until this many requests have a first token

    def __post_init__(self) -> None:
        _require(self.split in ("device", "host"), "serve.split", self.split, "device or host")
        _require(1 <= self.port <= 65535, "serve.port (--port)", self.port, "1..65535")
        _require_positive("serve", self, "ready_timeout_s")
        barrier = self.barrier
        _require(barrier is None or barrier >= 0, "serve.barrier", barrier, ">= 0 or unset")


@dataclass
class BenchConfig:
    """Workload sizes of eval.py."""

    arms: list[str] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    prompts: list[str] = field(default_factory=lambda: ["starter:bench"])
    output_tokens: int = 512
    min_answer_tokens: int = 641  # only prompts whose AR answer is at least this long
    rounds: int = 3  # interleaved repetitions of every (arm, load)
    batches_per_point: int = 1
    max_prompt_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    limit: int | None = None  # prompts in all; loads above it are left out
    # Small loads time more batches until a point holds this many requests (0: never).
    requests_per_point: int = 0
    warmup_tokens: int = 16  # untimed answer tokens per request at the start of a server
    request_timeout_s: float = 900.0  # a batch that takes longer has failed

    def __post_init__(self) -> None:
        _require_limit("bench", self.limit)
        _require(
            all(load >= 1 for load in self.loads), "bench.loads", self.loads, "requests, all >= 1"
        )
        _require_least("bench", self, 1, "output_tokens", "rounds", "batches_per_point")
        _require_least("bench", self, 1, "max_prompt_tokens")
        _require_least("bench", self, 0, "warmup_tokens", "temperature", "requests_per_point")
        _require_positive("bench", self, "request_timeout_s")
        known = names("arm")
        _require(
            len(set(self.arms)) == len(self.arms) and set(self.arms) <= set(known),
            "bench.arms (--arm)",
            self.arms,
            f"each at most once, out of {', '.join(known)}",
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
    run_dir: str = MISSING  # where this target's stages read and write
    seed: int = 0


def names(group: str) -> list[str]:
    """Names of the YAML files of one config group, sorted."""
    return sorted(p.stem for p in (CONFIG_DIR / group).glob("*.yaml"))


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


def check_stage(config: Config, stage: str) -> None:
    """Check what a stage needs of several sections together.

    Other stages may shrink ``target`` without touching the sizes of this one.

    Raises:
        ValueError: a load, batch or context that the target's engine cannot hold.
    """
    target, curves = config.target, config.curves
    sizes = {"eval": ("bench.loads", config.bench.loads)}
    sizes["curves"] = ("curves.batch_sizes", curves.batch_sizes)
    if stage in sizes:
        key, values = sizes[stage]
        most = target.max_num_seqs
        want = f"at least one, none above target.max_num_seqs, which is {most}"
        _require(bool(values) and max(values) <= most, key, values, want)
    if stage == "curves":
        want = f"less than target.max_model_len, which is {target.max_model_len}"
        fits = curves.context_len < target.max_model_len
        _require(fits, "curves.context_len", curves.context_len, want)


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
