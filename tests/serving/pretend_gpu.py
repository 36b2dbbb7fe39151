"""A GPU that is not there: CUDA tensors over CPU memory, and every wait is an error.

Inside ``PretendGpu`` a tensor made on ``cuda`` holds its values in CPU memory, so results
are real, but whatever would make the host wait for a real GPU raises ``Waited``: values
read by the host (``item``, ``tolist``, ``bool``), shapes that depend on values (``nonzero``,
boolean indexing, ``repeat_interleave`` without ``output_size``), blocking copies, and copies
from or to memory that is not pinned. Triton kernels run in the interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
GPU = ("cuda", "meta")  # torch's own code takes the tensors below for meta tensors
COPIES = {"copy_", "_to_copy", "to"}
WAITS = {
    "item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero",
    "nonzero_numpy", "argwhere", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip


class Waited(AssertionError):
    """The host would have waited for the device."""


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU; its values are in ``held``."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device="meta",
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        # Only python sees this: torch's own guards would look for a real device.
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    def __init__(self, real: torch.Tensor) -> None:
        self.held = real

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on a pretended GPU tensor outside PretendGpu")


class Event:
    """A CUDA event; it passes when the test says so (``Event.passes``)."""

    passes = True

    def __init__(self, **_: Any) -> None:
        self.marked = False

    def record(self, stream: Any = None) -> None:
        self.marked = True

    def query(self) -> bool:
        return Event.passes

    def elapsed_time(self, end: Event) -> float:
        assert self.marked and end.marked and Event.passes
        return 1.0

    def synchronize(self) -> None:
        if not Event.passes:
            raise Waited("event.synchronize()")


class Stream:
    """A CUDA stream that nothing is put on."""

    def __init__(self, *_: Any) -> None:
        pass


class PretendGpu(TorchDispatchMode):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: set[int] = set()

    def upload(
        self, data: Any, device: Any = None, dtype: Any = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """vLLM's ``async_tensor_h2d``: through pinned memory, without waiting."""
        values = torch.as_tensor(np.asarray(data)).clone()
        if out is not None:
            out.held.copy_(values)
            return out
        return OnGpu(values if dtype is None else values.to(dtype))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, OnGpu)]
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        pinned = bool(kwargs.pop("pin_memory", False))
        name = func._schema.name.removeprefix("aten::")
        if not ours and (target is None or target.type not in GPU):
            made = func(*args, **kwargs)
            if pinned:
                self._pinned.add(made.untyped_storage().data_ptr())
            return made
        to_host = target is not None and target.type == "cpu"
        if name in COPIES:
            to_host = self._check_copy(name, func, args, kwargs, target) or to_host
        else:
            self._check(name, args, kwargs, leaves)
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        made = func(*real_args, **real_kwargs)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return args[index] if index < len(args) else kwargs[argument.name]
        if name in COPIES:
            made = made.clone()  # a copy between devices never shares memory
        return made if to_host else tree_map(_wrapped, made)

    def _check(self, name: str, args: Any, kwargs: Any, leaves: list[Any]) -> None:
        if name in WAITS or (name == "where" and len(args) == 1):
            raise Waited(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise Waited("repeat_interleave without output_size")
        if "index" in name and len(args) > 1 and isinstance(args[1], (list, tuple)):
            for index in args[1]:
                if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                    raise Waited(f"{name} by a mask")
        mixed = any(isinstance(leaf, OnGpu) for leaf in leaves)
        for leaf in leaves if mixed else ():
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnGpu) and leaf.dim() > 0:
                raise Waited(f"{name} with a tensor of the host")

    def _check_copy(self, name: str, func: Any, args: Any, kwargs: Any, target: Any) -> bool:
        """Whether the copy ends on the host; raises if it is one to wait for."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if name == "copy_":
            host_side, source = args[0], args[1]
            from_gpu, to_gpu = isinstance(source, OnGpu), isinstance(host_side, OnGpu)
            host_side = host_side if from_gpu else source
        else:
            other = given.get("other")
            from_gpu = isinstance(args[0], OnGpu)
            to_gpu = isinstance(other, OnGpu) or (target is not None and target.type in GPU)
            to_gpu = to_gpu or (target is None and other is None and from_gpu)
            host_side = args[0]
        if from_gpu and to_gpu:
            return False
        if not given.get("non_blocking", False):
            raise Waited(f"{name} between host and device that blocks")
        # Tensor.to(non_blocking=True) towards the host allocates pinned memory by itself.
        allocates = from_gpu and name != "copy_"
        if not allocates and host_side.untyped_storage().data_ptr() not in self._pinned:
            raise Waited(f"{name} between the device and memory that is not pinned")
        return from_gpu


def _real(value: Any) -> Any:
    if isinstance(value, OnGpu):
        return value.held
    if isinstance(value, torch.device) and value.type in GPU:
        return torch.device("cpu")
    return value


def _wrapped(value: Any) -> Any:
    return OnGpu(value) if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def pretend_gpu(monkeypatch: Any) -> Iterator[PretendGpu]:
    """A pretended GPU for a ``with`` block: torch, events, Triton launches."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Event, "passes", True)

    def launch_on_real(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            launch(self, *(_real(arg) for arg in args), **{k: _real(v) for k, v in kwargs.items()})

    monkeypatch.setattr(GridExecutor, "__call__", launch_on_real)
    with torch.inference_mode(), PretendGpu() as gpu:
        yield gpu
