"""Engine hooks that let vLLM's V2 model runner serve on a CPU without Triton.

``prepare`` runs when plugins load, in every process, and touches only what is already
imported. The rest happens in the worker just before it builds its model runner: the CPU
worker replaces parts of torch when it is imported, and the GPU modules must see those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forespark.serving.cpu import registry
from forespark.serving.wrap import wrap


def prepare() -> None:
    """Hook configuration checks and worker start. Calling it again changes nothing."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrap(VllmConfig, "_validate_v2_model_runner", _validate_without_triton)
    wrap(VllmConfig, "_validate_adaptive_verification", _validate_without_graphs)
    wrap(WorkerWrapperBase, "init_device", _init_device)


def _validate_without_triton(original: Callable[..., None], config: Any) -> None:
    """Check the V2 runner's conditions as if Triton were there: the twins stand in for it."""
    import vllm.config.vllm as module

    has_triton = module.HAS_TRITON
    module.HAS_TRITON = True
    try:
        original(config)
    finally:
        module.HAS_TRITON = has_triton


def _validate_without_graphs(original: Callable[..., None], config: Any) -> None:
    """Check adaptive verification as if full CUDA graphs were on.

    vLLM wants them because a batch trimmed on the device must hit a captured shape; a CPU
    runs every shape as it is. All other conditions of the check stay.
    """
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    try:
        original(config)
    finally:
        compilation.cudagraph_mode = mode


def _init_device(original: Callable[..., None], wrapper: Any) -> None:
    """Install the CPU path in a worker that will run the V2 model runner."""
    if wrapper.vllm_config.use_v2_model_runner:
        install()
    original(wrapper)


def install() -> None:
    """Put the twins and the CPU hooks in place. Calling it again changes nothing."""
    import vllm.v1.worker.cpu_worker as cpu_worker  # first: it adapts torch to the CPU

    _complete_triton_placeholder()
    registry.install()

    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    # CPU attention reads its query lengths from the tensor and pads nothing, so a batch
    # trimmed on the "device" is just another batch.
    cpu_attn.CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.ALWAYS
    cpu_attn.CPUAttentionBackend.supports_device_cpu_query_lens_mismatch = classmethod(
        lambda cls: True
    )
    wrap(model_runner, "resolve_adaptive_cudagraph_mode", _keep_mode)
    # Compiling a dozen tiny operations costs half a minute at the first trimmed step.
    adaptive_verification._assign_draft_token_budget_compiled = (
        adaptive_verification._assign_draft_token_budget
    )
    wrap(cpu_worker.CPUWorker, "compile_or_warm_up_model", _warm_up)
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    wrap(DFlashQwen3Model, "_normalize_context_k", _normalize_context_k)
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    wrap(_CPUSHMDistributed, "all_gather_into_tensor", _gather_any_type)


def _complete_triton_placeholder() -> None:
    """Give vLLM's stand-in for Triton the one helper that launch code calls on the host."""
    from vllm.triton_utils import HAS_TRITON, triton

    if not HAS_TRITON:
        triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()


def _keep_mode(original: Callable[..., Any], mode: Any, **kwargs: Any) -> Any:
    """No graphs on a CPU: keep the mode instead of asking for full graphs."""
    return mode if not mode.has_full_cudagraphs() else original(mode, **kwargs)


def _warm_up(original: Callable[..., Any], worker: Any) -> Any:
    """After the worker's own warm-up, price the steps for adaptive verification."""
    times = original(worker)
    runner = worker.model_runner
    if getattr(runner, "adaptive_verification", None) is not None:
        from forespark.serving.cpu.pricing import price_steps

        price_steps(runner)
    return times


def _normalize_context_k(original: Callable[..., Any], drafter: Any, all_k: Any) -> Any:
    """Norm the drafter's context keys layer by layer, each with its own weight.

    vLLM hands all layers to one RMSNorm call with weights [layers, head]; the CPU kernel
    reads only the first row, so every later layer would be normed with the first layer's
    weight and acceptance falls silently.
    """
    import torch
    from vllm import _custom_ops

    normed = torch.empty_like(all_k)
    for layer in range(all_k.shape[0]):
        _custom_ops.rms_norm(
            normed[layer], all_k[layer], drafter._k_norm_weights[layer], drafter._rms_norm_eps
        )
    return normed


def _gather_any_type(
    original: Callable[..., None], ranks: Any, output: Any, input: Any, group: Any = None
) -> None:
    """Gather the drafter's candidate tokens of tensor-parallel ranks.

    vLLM's shared-memory gather copies bytes, but refuses 64-bit integers.
    """
    import torch

    if input.dtype == torch.int64:
        output, input = output.view(torch.float32), input.contiguous().view(torch.float32)
    original(ranks, output, input, group)
