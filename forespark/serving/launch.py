"""From a configuration to a vLLM engine: arguments, environment, in-process or served."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from forespark import record
from forespark.config import Config
from forespark.fore_d.calibrated import Calibration
from forespark.process import cpu_environment, on_cpu
from forespark.serving.artifacts import Artifacts, calibration_key, latency_key
from forespark.serving.caps import cap_ranges


def engine_environment(config: Config) -> dict[str, str]:
    """Environment variables an engine process of this target needs."""
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if not on_cpu():
        return env
    env |= cpu_environment(config.target.cpu_kv_cache_gib)
    if Path(config.target.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env


def enter_engine_environment(config: Config) -> None:
    """Put this process into the engine environment, restarting it once if need be.

    ``LD_PRELOAD`` acts only at process start, so a stage that runs the engine in its own
    process replaces itself by the same command with the variables set.
    """
    wanted = engine_environment(config)
    settled = all(os.environ.get(name) == value for name, value in wanted.items())
    if settled and "LD_PRELOAD" not in wanted:
        return
    if os.environ.get("FORESPARK_ENGINE_ENV") == "1":
        os.environ.update({k: v for k, v in wanted.items() if k != "LD_PRELOAD"})
        return
    environment = {**os.environ, **wanted, "FORESPARK_ENGINE_ENV": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def speculative_config(config: Config, artifacts: Artifacts) -> dict[str, Any] | None:
    """vLLM's ``speculative_config`` of the arm; None for autoregressive decoding."""
    arm = config.arm
    if arm.drafter == "none":
        return None
    speculative: dict[str, Any] = {
        "method": "dspark" if arm.drafter == "dspark" else "dflash",
        "model": str(artifacts.drafter),
        "num_speculative_tokens": config.drafter.num_speculative_tokens,
        "enable_adaptive_verification": arm.verify == "adaptive" or planned(config),
    }
    if arm.verify == "capped":
        speculative["num_speculative_tokens_per_batch_size"] = _stock_schedule(config, artifacts)
    return speculative


def _stock_schedule(config: Config, artifacts: Artifacts) -> list[list[int]]:
    """vLLM's [first load, last load, cap] table of the arm.

    Without caps (while they are measured) every cap has a row, so that on a GPU graphs
    are captured for all of them.
    """
    ranges = _cap_ranges(config, artifacts)
    if ranges is not None:
        return ranges
    K = config.drafter.num_speculative_tokens
    return [[cap + 1, cap + 1, cap] for cap in range(K + 1)]


def _cap_ranges(config: Config, artifacts: Artifacts) -> list[list[int]] | None:
    if artifacts.caps is None:
        return None
    key = latency_key(config, artifacts.drafter_sha256)
    content = record.read_json(artifacts.caps)
    return cap_ranges(content, config.arm.name, key, str(artifacts.caps))


def planned(config: Config) -> bool:
    """True when our own speculator and budget manager serve the arm."""
    arm = config.arm
    if arm.drafter == "dspark":
        return arm.draft == "planned"
    stock = arm.draft == "full" and arm.verify in ("full", "capped")
    return arm.drafter == "forespark" and not (stock and config.serve.force_length is None)


def forespark_settings(config: Config, artifacts: Artifacts) -> dict[str, Any]:
    """What reaches the workers as ``additional_config["forespark"]`` (JSON only)."""
    settings: dict[str, Any] = {
        "arm": config.arm.name,
        "drafter": config.arm.drafter,
        "target": config.target.name,
        "planned": planned(config),
        "draft": config.arm.draft,
        "verify": config.arm.verify,
        "curve": config.arm.curve,
        "search": config.arm.search,
        "split": "host" if config.target.sparse_mla else config.serve.split,
        "price_other": config.schedule.price_other,
        "prior_acceptance": config.schedule.prior_acceptance,
        "force_length": config.serve.force_length,
        "min_gain": config.serve.min_gain,
        "min_batch": config.serve.min_batch,
        "min_draft": config.serve.min_draft,
        "recalibrate": config.serve.recalibrate,
        "caps": _cap_ranges(config, artifacts),
        "trace": config.serve.trace,
        "trace_detail": config.serve.trace_detail,
        "drafter_sha256": artifacts.drafter_sha256,
        "latency_key": None,
        "theta": None,
    }
    stock = config.arm.drafter == "dspark" and not planned(config)
    if stock and artifacts.calibration is not None:
        # Stock code serves this arm: it gets plain numbers, not files.
        wanted = calibration_key(config, "dspark", artifacts.drafter_sha256)
        path = artifacts.calibration
        fitted = Calibration.from_record(record.read_json(path), wanted, str(path))
        settings["theta"] = fitted.post.theta
    if artifacts.latency is not None:
        settings["latency_key"] = latency_key(config, artifacts.drafter_sha256)
    for name in ("heads", "calibration", "latency"):
        path = getattr(artifacts, name)
        settings[name] = None if path is None else str(path)
    return settings


def engine_arguments(config: Config, artifacts: Artifacts) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` (and, as flags, of ``vllm serve``)."""
    target = config.target
    arguments: dict[str, Any] = {
        "model": target.model,
        "served_model_name": target.name,
        "dtype": target.dtype,
        "max_model_len": target.max_model_len,
        "max_num_seqs": target.max_num_seqs,
        "max_num_batched_tokens": target.max_num_batched_tokens,
        "tensor_parallel_size": target.tensor_parallel_size,
        "enable_expert_parallel": target.expert_parallel,
        "kv_cache_dtype": target.kv_cache_dtype,
        "additional_config": {"forespark": forespark_settings(config, artifacts)},
    }
    speculative = speculative_config(config, artifacts)
    if speculative is not None:
        arguments["speculative_config"] = speculative
    if on_cpu():
        arguments["enforce_eager"] = True
    else:
        arguments["max_cudagraph_capture_size"] = target.cudagraph_max_tokens
    return arguments


def serve_command(config: Config, artifacts: Artifacts, extra: list[str]) -> list[str]:
    """``vllm serve`` command line; ``extra`` flags come last and so win."""
    arguments = engine_arguments(config, artifacts)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", arguments.pop("model")]
    command += ["--host", config.serve.host, "--port", str(config.serve.port)]
    if config.serve.barrier:
        command += ["--scheduler-cls", "forespark.serving.barrier.BarrierScheduler"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command += [flag] if value else []
        elif isinstance(value, dict):
            command += [flag, json.dumps(value)]
        else:
            command += [flag, str(value)]
    return [*command, *config.target.serve_args, *extra]
