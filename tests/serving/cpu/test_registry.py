"""The registry: launch syntax, installation, and kernels nobody wrote a twin for."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from forespark.serving.cpu import registry


@pytest.fixture
def kernels(monkeypatch) -> ModuleType:
    """A stand-in for vLLM's modules: one kernel, imported by name elsewhere, and another."""

    def _add_kernel(out, value):
        raise AssertionError("the kernel must not run")

    def _other_kernel(out):
        raise AssertionError("the kernel must not run")

    home = ModuleType("vllm.v1.worker.gpu.fake_home")
    user = ModuleType("vllm.v1.worker.gpu.fake_user")
    home._add_kernel = user._add_kernel = _add_kernel
    home._other_kernel = _other_kernel
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def add(grid, out, value, BLOCK=1):
        out.append((grid, value, BLOCK))

    key = (home.__name__, "_add_kernel")
    monkeypatch.setattr(registry, "load", lambda: {key: registry.Twin(*key, add)})
    return home


def test_install_replaces_every_holder_once(kernels):
    assert registry.install() == ["vllm.v1.worker.gpu.fake_home._add_kernel"]
    assert registry.install() == []
    out: list = []
    for module in (kernels, sys.modules["vllm.v1.worker.gpu.fake_user"]):
        module._add_kernel[(2, 3)](out, 7, BLOCK=4, num_warps=8)
    assert out == [((2, 3), 7, 4)] * 2


def test_a_kernel_without_twin_says_so(kernels):
    registry.install()
    with pytest.raises(NotImplementedError, match=r"_other_kernel has no CPU twin"):
        kernels._other_kernel[(1,)]([])


def test_another_vllm_is_refused(kernels):
    del kernels._add_kernel
    with pytest.raises(ValueError, match=r"no kernel _add_kernel.*0\.30\.0"):
        registry.install()


def test_every_twin_has_its_kernel():
    """In the interpreter the kernels are Triton functions; none may have been renamed."""
    import importlib

    for module, name in registry.load():
        assert hasattr(importlib.import_module(module), name), (module, name)
