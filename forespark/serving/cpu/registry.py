"""Registry of CPU twins: plain functions that stand in for vLLM's Triton kernels.

A kernel is launched as ``kernel[grid](*args, **constexprs, num_warps=...)``. A twin takes
``fn(grid, *args, **constexprs)``: the launch grid, then exactly the kernel's parameters,
with tensors where the kernel has pointers. ``install`` replaces the kernel object in its
module by a ``Twin``, so vLLM's own wrappers (block sizes, allocation, early exits) stay in
use and every twin can be tested against the kernel it replaces with identical arguments.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

# Options of a Triton launch that say how a GPU runs the kernel, not what it computes.
LAUNCH_OPTIONS = frozenset(
    {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion"}
)

_twins: dict[tuple[str, str], Twin] = {}


class Twin:
    """Stands where a Triton kernel stood: ``twin[grid](*args)`` calls a plain function.

    Attributes:
        function: the plain function, called as ``function(grid, *args, **constexprs)``.
        kernel: the replaced kernel object, None until ``install``; tests launch it in the
            Triton interpreter and compare.
    """

    def __init__(self, module: str, name: str, function: Callable[..., Any]) -> None:
        self.module = module
        self.name = name
        self.function = function
        self.kernel: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if not LAUNCH_OPTIONS.isdisjoint(kwargs):
                for option in LAUNCH_OPTIONS:
                    kwargs.pop(option, None)
            self.function(grid, *args, **kwargs)

        return launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call, not launch: what stood here was a plain function named like a kernel."""
        return self.kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Twin({self.module}.{self.name})"


def twin(module: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the CPU twin of the Triton kernel ``module.name``.

    Args:
        module: full name of the vLLM module that defines the kernel.
        name: the kernel's name in that module.

    Returns:
        A decorator that leaves the function as it is.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        key = (module, name)
        known = _twins.get(key)
        assert known is None or known.function.__module__ == function.__module__, (
            f"two twins for {module}.{name}: {known} and {function}"
        )
        _twins[key] = Twin(module, name, function)
        return function

    return register


def load() -> dict[tuple[str, str], Twin]:
    """Import this package's modules, which register twins; all twins by (module, kernel)."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_twins)


def _holders(name: str, kernel: Any) -> list[ModuleType]:
    """Modules that imported this kernel by name before it was replaced."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("vllm.") and getattr(module, "__dict__", {}).get(name) is kernel
    ]


def install() -> list[str]:
    """Put every registered twin in place of its kernel. Calling it again changes nothing.

    Returns:
        The kernels replaced by this call, as ``module.name``.

    Raises:
        ValueError: vLLM has no such kernel, i.e. it is not the version we were made for.
    """
    replaced = []
    for (module_name, name), stand_in in load().items():
        module = importlib.import_module(module_name)
        kernel = getattr(module, name, None)
        if isinstance(kernel, Twin):
            continue
        if kernel is None:
            raise ValueError(
                f"{module_name} has no kernel {name}: this vLLM is not 0.30.0; run setup.sh again"
            )
        stand_in.kernel = kernel
        for holder in _holders(name, kernel):
            setattr(holder, name, stand_in)
        replaced.append(f"{module_name}.{name}")
    _name_missing()
    return replaced


def _name_missing() -> None:
    """Without Triton a kernel is a bare function: make launching it say what is missing."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vllm.v1.worker.gpu."):
            continue
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(value, FunctionType):
                refusing = Twin(value.__module__, name, _refuse(value))
                refusing.kernel = value
                setattr(module, name, refusing)


def _refuse(kernel: FunctionType) -> Callable[..., None]:
    def launch(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{kernel.__module__}.{kernel.__name__} has no CPU twin: the feature that needs it "
            "runs on a GPU only"
        )

    return launch
