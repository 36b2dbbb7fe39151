"""Every kernel of vLLM's speculative decoding has a twin, or a reason not to."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from forespark.serving.cpu import registry

PACKAGE = "vllm.v1.worker.gpu.spec_decode"
# Drafters with one module per step (several MTP layers): no arm of ours uses them.
WITHOUT_TWIN = {f"{PACKAGE}.multi_module_mtp.speculator"}


def test_every_kernel_has_a_twin():
    spec = importlib.util.find_spec(PACKAGE)
    root = Path(spec.submodule_search_locations[0])
    kernels = set()
    for path in root.rglob("*.py"):
        parts = (PACKAGE, *path.relative_to(root).with_suffix("").parts)
        names = re.findall(r"@triton\.jit[^\n]*\ndef (_\w+_kernel)\(", path.read_text())
        kernels |= {(".".join(parts), name) for name in names}
    assert len(kernels) > 15  # the pattern still finds them
    missing = kernels - registry.load().keys()
    assert {module for module, _ in missing} == WITHOUT_TWIN
