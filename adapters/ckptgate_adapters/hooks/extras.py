"""Which extra brings a framework, for who imports a hook without it."""

from __future__ import annotations

from typing import Final

__all__ = ["lacks"]

_PACKAGES: Final = {"transformers": "Hugging Face Transformers", "torch": "PyTorch"}


def lacks(extra: str, error: ImportError) -> ImportError:
    """The error for a hook whose framework can't be imported; *error* is why."""
    title = _PACKAGES.get(extra, extra)
    msg = f"ckptgate.{extra} needs {title}: pip install 'ckptgate[{extra}]' ({error})"
    return ImportError(msg, name=error.name, path=error.path)
