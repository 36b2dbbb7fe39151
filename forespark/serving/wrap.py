"""Replace a method of vLLM by a wrapper around it, once per wrapper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(original, *args)``.

    A wrapper already in place is not added again, so plugins may load many times;
    different wrappers of one function stack.
    """
    original = getattr(owner, name)
    applied: frozenset[str] = getattr(original, "_forespark", frozenset())
    label = f"{wrapper.__module__}.{wrapper.__qualname__}"
    if label in applied:
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replacement._forespark = applied | {label}  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
