"""Runs a vLLM kernel in Triton's interpreter beside its twin and compares every tensor.

``beside`` replaces kernels of a vLLM module by ``SideBySide`` objects: each launch clones
all arguments (storage, strides and offset), runs the kernel on the originals and the twin
on the clones, and then compares all of them. So an entry the twin must leave alone is
checked as well as one it must write.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import triton.language.extra.libdevice as libdevice
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from forespark.serving.cpu import registry

# Sums of up to 8,192 exponentials in float32, added in another order, with exponentials
# that are 2e-7 apart. A wrong scale, block or row is off by more than 1e-2.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}


def _log1p(x: tl.tensor) -> tl.tensor:
    """libdevice.log1p, which the interpreter lacks."""
    return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


def _bool_mask(method, position: int):
    """A load or store whose mask the interpreter made int32, out of a scalar int1."""

    def call(self, *arguments):
        mask = arguments[position]
        repaired = TensorHandle(mask.data.astype(bool), tl.int1)
        return method(self, *arguments[:position], repaired, *arguments[position + 1 :])

    return call


@contextmanager
def interpreter_repairs() -> Iterator[None]:
    """What Triton 3.9's interpreter lacks for vLLM's sampling kernels."""
    with (
        mock.patch.object(libdevice, "log1p", _log1p),
        mock.patch.multiple(
            InterpreterBuilder,
            create_masked_load=_bool_mask(InterpreterBuilder.create_masked_load, 1),
            create_masked_store=_bool_mask(InterpreterBuilder.create_masked_store, 2),
        ),
        np.errstate(invalid="ignore", divide="ignore"),  # -inf and NaN are inputs here
    ):
        yield


def _clone(value):
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype)
    return copy.set_(storage, value.storage_offset(), value.size(), value.stride())


class SideBySide:
    """``kernel[grid](...)`` that also runs the twin and compares; counts its launches."""

    def __init__(self, module: str, name: str, kernel) -> None:
        self.name = name
        self.kernel = kernel.kernel if isinstance(kernel, registry.Twin) else kernel
        self.twin = registry.load()[module, name]
        self.launches = 0

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.launches += 1
            twin_args = [_clone(a) for a in args]
            self.kernel[grid](*args, **kwargs)
            self.twin[grid](*twin_args, **kwargs)
            for index, (expected, got) in enumerate(zip(args, twin_args, strict=True)):
                if isinstance(expected, torch.Tensor):
                    torch.testing.assert_close(
                        got,
                        expected,
                        msg=lambda m, i=index: f"{self.name}, argument {i}: {m}",
                        **(TOLERANCE if expected.is_floating_point() else {"rtol": 0, "atol": 0}),
                    )

        return launch


@contextmanager
def beside(module_name: str, *names: str) -> Iterator[dict[str, SideBySide]]:
    """Within the block, launches of these kernels of a vLLM module are compared."""
    module = importlib.import_module(module_name)
    kernels = {name: getattr(module, name) for name in names}
    pairs = {name: SideBySide(module_name, name, kernel) for name, kernel in kernels.items()}
    try:
        for name, pair in pairs.items():
            setattr(module, name, pair)
        with interpreter_repairs():
            yield pairs
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


@contextmanager
def twins_only(module_name: str, *names: str) -> Iterator[None]:
    """Within the block, these kernels of a vLLM module are their twins."""
    module = importlib.import_module(module_name)
    kernels = {name: getattr(module, name) for name in names}
    try:
        for name in names:
            setattr(module, name, registry.load()[module_name, name])
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
