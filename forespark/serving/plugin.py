"""Entry point of the vLLM plugin (``vllm.general_plugins``): what we change in vLLM.

vLLM calls ``register`` in every process it starts. ``FORESPARK_PLUGIN=0`` or
``VLLM_PLUGINS=''`` leaves vLLM as the patches make it, for instance to show that a drafter
loads in plain vLLM.
"""

from __future__ import annotations

import os

_registered = False


def register() -> None:
    """Install our hooks for this machine's device. Calling it again changes nothing."""
    global _registered
    if _registered or os.environ.get("FORESPARK_PLUGIN") == "0":
        return
    _registered = True
    from vllm.platforms import current_platform

    from forespark.serving import runner

    if current_platform.is_cpu():
        from forespark.serving.cpu.hooks import prepare

        prepare()
    runner.prepare()
