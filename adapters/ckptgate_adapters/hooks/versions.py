"""Which releases a process saves with: of packages that it has loaded, of Python. Any thread."""

from __future__ import annotations

import platform
import sys
from typing import Final

__all__ = ["loaded_versions"]

_PACKAGES: Final = (
    "accelerate",
    "deepspeed",
    "jax",
    "lightning",
    "megatron.core",
    "numpy",
    "orbax.checkpoint",
    "safetensors",
    "torch",
    "transformers",
)


def loaded_versions() -> dict[str, str]:
    """Package -> version; nothing is imported for it."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found
