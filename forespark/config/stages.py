"""Sections of the stages: data, train, calibrate, curves, eval."""

from __future__ import annotations

from dataclasses import dataclass, field

from forespark.config.checks import (
    names,
    require,
    require_least,
    require_limit,
    require_positive,
)

# What eval.py --bench knows.
BENCHES = (
    "decode", "e2e", "mathcode", "slo", "breakdown", "acceptance", "motivation", "predictor",
    "scheduler", "oracle",
)  # fmt: skip


@dataclass
class DataConfig:
    """Corpus: prompts, the target's answers, tokens."""

    sources: list[str] = field(default_factory=lambda: ["starter"])
    # Prompts that must not be trained on (normalized and exact match), as sources.
    exclude: list[str] = field(
        default_factory=lambda: [
            "starter:bench",
            "starter:calibration",
            "starter:conversations",
            "starter:questions",
        ]
    )
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
        require_limit("data", self.limit)
        require(bool(self.sources), "data.sources", self.sources, "at least one source")
        require_least("data", self, 1, "max_tokens", "max_prompt_tokens", "concurrency")
        require_least("data", self, 0, "magpie_rows", "magpie_temperature", "temperature")
        require(0.0 < self.top_p <= 1.0, "data.top_p", self.top_p, "in (0, 1]")


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
    # A row ends where an answer has repeated itself for more tokens than this; None: never.
    most_repeated: int | None = None
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
    # float32 matrix products, as torch.set_float32_matmul_precision: "medium" rounds their
    # inputs to bfloat16 where that is faster (AMX; TF32 or bfloat16 on a GPU).
    matmul_precision: str = "highest"
    attn_impl: str = "simple_flex_attention"
    processes: int = 1  # data-parallel ranks on this machine, one per GPU; more: by torchrun
    # GPUs of the hidden-state server, as in CUDA_VISIBLE_DEVICES; ranks use the first ones.
    server_devices: str | None = None
    hidden_states: str = "server"  # server (vLLM, started or --endpoint) | local (in process)
    cache_hidden_states: bool = True  # keep each row's states on disk after first use
    seed: int = 0

    def __post_init__(self) -> None:
        require_limit("train", self.limit)
        require_least("train", self, 1, "epochs", "total_seq_len", "max_anchors", "processes")
        require_least("train", self, 1, "validate_every", "checkpoint_every")
        require_positive("train", self, "lr", "dspark_lr", "muon_lr")
        require(
            self.most_repeated is None or self.most_repeated >= 0,
            "train.most_repeated",
            self.most_repeated,
            ">= 0 or unset",
        )
        require(
            self.max_steps is None or self.max_steps >= 1,
            "train.max_steps (--max-steps)",
            self.max_steps,
            ">= 1 or unset",
        )
        require(
            self.optimizer in ("adamw", "muon"), "train.optimizer", self.optimizer, "adamw or muon"
        )
        require(
            self.schedule in ("cosine", "wsd"), "train.schedule", self.schedule, "cosine or wsd"
        )
        require(
            self.hidden_states in ("server", "local"),
            "train.hidden_states",
            self.hidden_states,
            "server or local",
        )
        require(
            self.matmul_precision in ("highest", "high", "medium"),
            "train.matmul_precision",
            self.matmul_precision,
            "highest, high or medium",
        )
        require(
            0.0 < self.decay_fraction <= 1.0,
            "train.decay_fraction",
            self.decay_fraction,
            "in (0, 1]",
        )
        require(
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
    # Batch-wise arms whose caps are measured; then the estimators are not calibrated.
    caps: list[str] = field(default_factory=list)  # out of bw, bw_stock
    cap_loads: list[int] = field(default_factory=list)  # requests in flight; [] is pre_loads
    cap_prompts: int = 4000  # per load and cap; at least twice the load
    cap_rounds: int = 1  # repetitions of every load and cap

    def __post_init__(self) -> None:
        require_limit("calibrate", self.limit)
        require_least("calibrate", self, 1, "max_tokens", "post_load", "bins", "theta_grid")
        require(
            bool(self.pre_loads) and all(load >= 1 for load in self.pre_loads),
            "calibrate.pre_loads",
            self.pre_loads,
            "at least one number of requests, all >= 1",
        )
        require_least("calibrate", self, 1, "cap_prompts", "cap_rounds")
        require(
            all(load >= 1 for load in self.cap_loads),
            "calibrate.cap_loads",
            self.cap_loads,
            "numbers of requests, all >= 1, or [] for calibrate.pre_loads",
        )
        require(
            set(self.caps) <= {"bw", "bw_stock"} and len(set(self.caps)) == len(self.caps),
            "calibrate.caps",
            self.caps,
            "each at most once, out of bw, bw_stock",
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
        require_limit("curves", self.limit)
        require_least("curves", self, 1, "steps_per_point", "context_len")
        require(
            all(size >= 1 for size in self.batch_sizes),
            "curves.batch_sizes",
            self.batch_sizes,
            "requests, all >= 1",
        )


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
    # decode: prompts in all, loads above it are left out; acceptance: prompts of each set;
    # predictor: prompts; scheduler, oracle: batches per size
    limit: int | None = None
    # decode: one server per arm at the same time, arms taking turns batch by batch; needs the
    # memory of all of them, and a machine whose idle servers cost nothing.
    side_by_side: bool = False
    # Small loads time more batches until a point holds this many requests (0: never).
    requests_per_point: int = 0
    warmup_tokens: int = 16  # untimed answer tokens per request at the start of a server
    request_timeout_s: float = 900.0  # a batch that takes longer has failed
    # Of the acceptance benchmark: NAME=SOURCE; a name may have several sources.
    sets: list[str] = field(default_factory=lambda: ["starter=starter:bench"])
    set_prompts: int = 80  # of each set, at most
    acceptance_load: int = 32  # requests in flight
    # Of the scheduler benchmark.
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 64, 192, 512, 2048])
    decision_drafts: int = 15  # K of the timed decisions
    decisions: int = 300  # timed calls per decider, size and round
    schedules: int = 100_000  # random schedules that are checked; 0: none

    def __post_init__(self) -> None:
        require_limit("bench", self.limit)
        require(
            all(load >= 1 for load in self.loads), "bench.loads", self.loads, "requests, all >= 1"
        )
        require_least("bench", self, 1, "output_tokens", "rounds", "batches_per_point")
        require_least("bench", self, 1, "max_prompt_tokens", "set_prompts", "acceptance_load")
        require_least("bench", self, 0, "warmup_tokens", "temperature", "requests_per_point")
        require_least("bench", self, 3, "decisions")
        require_least("bench", self, 0, "schedules")
        named = all(name and source for name, _, source in (s.partition("=") for s in self.sets))
        want = "one or more NAME=SOURCE, such as gsm8k=file:gsm8k.jsonl"
        require(bool(self.sets) and named, "bench.sets", self.sets, want)
        drafts = self.decision_drafts
        require(1 <= drafts <= 63, "bench.decision_drafts", drafts, "1..63")
        sizes = self.batch_sizes
        require(bool(sizes) and min(sizes) >= 1, "bench.batch_sizes", sizes, "requests, all >= 1")
        require_positive("bench", self, "request_timeout_s")
        known = names("arm")
        require(
            len(set(self.arms)) == len(self.arms) and set(self.arms) <= set(known),
            "bench.arms (--arm)",
            self.arms,
            f"each at most once, out of {', '.join(known)}",
        )
