"""Hooks into vLLM's V2 model runner: our speculator, our budget manager, step meters.

Installed by the plugin in every worker, on any device. A run without
``additional_config["forespark"]`` is left exactly as vLLM made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forespark.serving.wrap import wrap


def prepare() -> None:
    """Hook worker start. Calling it again changes nothing."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrap(WorkerWrapperBase, "init_device", _init_device)


def settings_of(vllm_config: Any) -> dict[str, Any] | None:
    """Our settings of an engine, None when it runs without ForeSpark."""
    extra = vllm_config.additional_config
    return extra.get("forespark") if isinstance(extra, dict) else None


def _init_device(original: Callable[..., None], wrapper: Any) -> None:
    if wrapper.vllm_config.use_v2_model_runner and settings_of(wrapper.vllm_config) is not None:
        install()
    original(wrapper)


def install() -> None:
    """Hook the model runner's methods. Calling it again changes nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # The CPU worker adapts torch when imported; the runner's modules must see that.
        import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.v1.worker.gpu import model_runner

    wrap(model_runner, "init_speculator", _init_speculator)
    wrap(model_runner.GPUModelRunner, "initialize_kv_cache", _initialize_kv_cache)
    wrap(model_runner.GPUModelRunner, "execute_model", _execute_model)
    wrap(model_runner.GPUModelRunner, "sample", _sample)
    wrap(model_runner.GPUModelRunner, "sample_tokens", _sample_tokens)


def _init_speculator(original: Callable[..., Any], vllm_config: Any, device: Any) -> Any:
    settings = settings_of(vllm_config)
    if settings is None or not settings["planned"]:
        return original(vllm_config, device)
    if settings["drafter"] == "dspark":
        from forespark.serving.dspark import PlannedDSpark

        return PlannedDSpark(vllm_config, device)
    from forespark.serving.speculator import ForeSparkSpeculator

    return ForeSparkSpeculator(vllm_config, device)


def _initialize_kv_cache(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any):
    """Once request states exist: attach the budget manager and the step meter."""
    original(runner, *args, **kwargs)
    settings = settings_of(runner.vllm_config)
    if settings is None or kwargs.get("is_profiling"):
        return
    from forespark.serving.meter import StepMeter
    from forespark.serving.planned import PlannedDrafting

    speculator = runner.speculator
    if isinstance(speculator, PlannedDrafting):
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

        from forespark.serving.manager import BudgetManager

        runner.adaptive_verification = BudgetManager(
            speculator.planner,
            runner.req_states,
            runner.input_buffers.query_start_loc,
            runner.model_state.num_new_sampled_tokens_per_step,
            get_max_chunk_logits(runner.vocab_size),
        )
        speculator.manager = runner.adaptive_verification
        runner.adaptive_verification.online = speculator.online
    elif settings["theta"] is not None and runner.adaptive_verification is not None:
        from forespark.serving.dspark import calibrate_confidences

        calibrate_confidences(runner.adaptive_verification, settings["theta"])
    from forespark.serving.ranks import Ranks

    if Ranks.of_engine().rank == 0:  # one trace and one set of counters for all ranks
        runner.forespark_meter = StepMeter(runner, settings)
    if speculator is not None and hasattr(speculator, "propose"):
        wrap(speculator, "propose", _propose_of(runner))


def _propose_of(runner: Any) -> Callable[..., Any]:
    def timed_propose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        meter = _meter(runner)
        if meter is None or kwargs.get("dummy_run"):
            return original(*args, **kwargs)
        meter.draft_starts()
        tokens = original(*args, **kwargs)
        meter.draft_ends()
        return tokens

    return timed_propose


def _meter(runner: Any) -> Any:
    return getattr(runner, "forespark_meter", None)


def _execute_model(original: Callable[..., Any], runner: Any, output: Any, *args: Any, **kw: Any):
    meter = _meter(runner)
    if meter is not None and not kw.get("dummy_run") and output.total_num_scheduled_tokens > 0:
        meter.step_starts()
    runner.forespark_cap = output.num_spec_tokens_to_schedule
    return original(runner, output, *args, **kw)


def _sample(original: Callable[..., Any], runner: Any, hidden: Any, batch: Any, grammar: Any):
    output, num_sampled, num_rejected = original(runner, hidden, batch, grammar)
    ranks = getattr(runner.speculator, "ranks", None)
    if ranks is not None:
        ranks.share(output.sampled_token_ids, num_sampled, num_rejected)
    meter = _meter(runner)
    if meter is not None:
        meter.sampled(batch, num_sampled, num_rejected)
    return output, num_sampled, num_rejected


def _sample_tokens(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(runner, *args, **kwargs)
    speculative = runner.vllm_config.speculative_config
    if speculative is not None and speculative.uses_dynamic_speculative_decoding():
        _cap_offered_drafts(runner)
    meter = _meter(runner)
    if meter is not None:
        meter.step_ends()
    return result


def _cap_offered_drafts(runner: Any) -> None:
    """Offer the scheduler no more drafts than its batch-wise cap of this step allows.

    With asynchronous scheduling vLLM's scheduler applies its cap itself. Without (always so
    on a CPU) it takes as many drafts as it is offered, and the V2 runner offers K.
    """
    handler, cap = runner.draft_tokens_handler, runner.forespark_cap
    handler.num_draft_tokens = min(handler.num_draft_tokens, cap)
    if handler.draft_tokens_np is not None:
        handler.draft_tokens_np = handler.draft_tokens_np[:, :cap]
