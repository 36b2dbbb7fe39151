"""Sections that describe what is served: target, arm, drafter, schedule, server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from forespark.config.checks import require, require_least, require_positive

DRAFTERS = ("none", "forespark", "dspark")
DRAFT_RULES = ("none", "full", "planned", "capped")
VERIFY_RULES = ("none", "full", "adaptive", "capped")


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
        require_least("target", self, 1, *counts)
        require(self.max_model_len >= 16, "target.max_model_len", self.max_model_len, ">= 16")


@dataclass
class ArmConfig:
    """One serving policy: who drafts, how much, and how much is verified."""

    name: str = MISSING
    drafter: str = "none"  # none | forespark | dspark
    # none | full (K tokens) | planned (joint schedule) | capped (one length per load)
    draft: str = "none"
    verify: str = "none"  # none | full | adaptive | capped (vLLM's own cap, by load)
    curve: str = "triangle"  # triangle | single: which pre-draft rows are read
    search: str = "ranked"  # ranked (pooled scores) | exhaustive (all schedules, small batches)

    def __post_init__(self) -> None:
        require(self.drafter in DRAFTERS, "arm.drafter", self.drafter, f"one of {DRAFTERS}")
        require(self.draft in DRAFT_RULES, "arm.draft", self.draft, f"one of {DRAFT_RULES}")
        require(self.verify in VERIFY_RULES, "arm.verify", self.verify, f"one of {VERIFY_RULES}")
        drafts = self.drafter != "none"
        require(
            (self.draft != "none") == drafts and (self.verify != "none") == drafts,
            "arm.draft and arm.verify",
            (self.draft, self.verify),
            "none and none without a drafter, something else with one",
        )
        capped = "capped" in (self.draft, self.verify)
        require(
            not capped or (self.drafter == "forespark" and "full" in (self.draft, self.verify)),
            "arm.drafter, arm.draft and arm.verify",
            (self.drafter, self.draft, self.verify),
            "forespark, and full for what is not capped: the caps are measured so",
        )
        require(self.curve in ("triangle", "single"), "arm.curve", self.curve, "triangle or single")
        searches = (self.search, self.draft) == ("exhaustive", "planned")
        want = "ranked, or exhaustive with arm.draft=planned"
        require(searches or self.search == "ranked", "arm.search", self.search, want)


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
    # Where training starts: random | target (copies of the target's last layers) | the folder
    # of an exported drafter, or of another's DFlash 2 checkpoint of this shape.
    init: str = "random"
    # Checkpoint to use; None looks in <run_dir>/drafters/<name>, then models/<target>-<name>.
    dir: str | None = None
    directional: bool = False  # causal blocks; the estimator then has row K only

    def __post_init__(self) -> None:
        require(
            1 <= self.num_speculative_tokens <= 63,
            "drafter.num_speculative_tokens",
            self.num_speculative_tokens,
            "1..63",
        )
        known = self.init in ("random", "target") or (Path(self.init) / "config.json").is_file()
        want = "random, target, or the folder of a drafter (with config.json)"
        require(known, "drafter.init", self.init, want)
        require(self.num_layers >= 1, "drafter.num_layers", self.num_layers, ">= 1")


@dataclass
class ScheduleConfig:
    """The joint schedule (Section 4.3)."""

    price_other: bool = True  # False: the literal denominator of Eq. (4)
    # Survival of draft positions 1..K used before any estimate exists.
    prior_acceptance: float = 0.6

    def __post_init__(self) -> None:
        prior = self.prior_acceptance
        require(0.0 < prior < 1.0, "schedule.prior_acceptance", prior, "between 0 and 1")


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
    # Of arms that plan; each is off at 0.
    min_gain: float = 0.0  # shorten or trim drafts only for this share more tokens per ms
    min_batch: int = 0  # with fewer requests: full blocks, full verification, no plan
    min_draft: int = 0  # tokens that every request drafts and verifies at least
    # Outcomes after which an older one counts 1/e; 0 serves the calibration as it was fitted.
    recalibrate: float = 0.0

    def __post_init__(self) -> None:
        require(self.split in ("device", "host"), "serve.split", self.split, "device or host")
        require(1 <= self.port <= 65535, "serve.port (--port)", self.port, "1..65535")
        require_positive("serve", self, "ready_timeout_s")
        require_least("serve", self, 0, "min_batch", "min_draft")
        gain = self.min_gain
        require(0.0 <= gain < math.inf, "serve.min_gain", gain, "a share >= 0, such as 0.02")
        memory = self.recalibrate
        want = "a number of outcomes >= 0, such as 2000"
        require(0.0 <= memory < math.inf, "serve.recalibrate", memory, want)
        barrier = self.barrier
        require(barrier is None or barrier >= 0, "serve.barrier", barrier, ">= 0 or unset")
