"""Compile launches for NVIDIA GPUs on a machine without one; part of gpu_check.py.

The launches that a step would make are recorded, not run; each distinct one is compiled down to
machine code by the tools that Triton brings along. It shows that the compiler takes the kernels,
what registers they need and whether they spill, not that they are right.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip


class Recorder:
    """Stands where a jitted kernel is and keeps its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any], int]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            warps = options.pop("num_warps")
            names = [parameter.name for parameter in self.kernel.params]
            bound = dict(zip(names, arguments, strict=False)) | options
            self.launches.append((self.kernel, bound, warps))

        return launch


def compile_all(
    targets: tuple[int, ...],
    size: dict[str, Any],
    jitted: list[tuple[Any, str]],
    step_of: Callable[..., Any],
    kernels: dict[str, Callable[..., Any]],
    plain: dict[str, Callable[..., Any]],
) -> list[dict[str, Any]]:
    """One row per distinct launch and architecture, for every batch size."""
    launches: list[tuple[Any, dict[str, Any], int]] = []
    small = {**size, "V": 1024}  # the vocabulary is no part of any kernel's code
    kept = [(module, name, getattr(module, name)) for module, name in jitted]
    for module, name, kernel in kept:
        setattr(module, name, Recorder(kernel, launches))
    try:
        for n in size["requests"]:
            step = step_of(n, small, "cpu")
            step.plan(n)
            step.run(plain)
            for name, arguments in step.calls.items():
                kernels[name](*arguments)
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)
    rows, seen = [], set()
    for kernel, bound, warps in launches:
        signature, constants = described(kernel, bound)
        for architecture in targets:
            key = (kernel.__name__, str(signature), str(constants), warps, architecture)
            if key not in seen:
                seen.add(key)
                rows.append(compiled(kernel, signature, constants, warps, architecture))
                print(rows[-1])
    return rows


def described(kernel: Any, bound: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """(signature, constants) of a launch, in the compiler's words."""
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = bound[parameter.name]
        # Triton makes a constant of an argument that is 1.
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        else:
            signature[parameter.name] = "i32"
    return signature, constants


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, architecture: int
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kernel": kernel.__name__.strip("_"), "sm": architecture, "warps": warps,
        "constants": constants, "ok": True,
    }  # fmt: skip
    try:
        result = triton.compile(
            ASTSource(kernel, signature, constants),
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": warps},
        )
    except Exception as error:  # whatever the compiler raises is the finding
        return {**row, "ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    return {**row, "shared_bytes": result.metadata.shared, **resources(result.asm["cubin"])}


def resources(binary: bytes) -> dict[str, int]:
    """Registers and spilled (stack) bytes per thread, by cuobjdump; {} without it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", done.stdout))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"])} if found else {}
