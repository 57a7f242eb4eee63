"""`CkptFileSystem`: what fsspec asks, as requests to the daemon.

How the daemon is reached is said by a subclass (`reach`), which is what is registered as `ckpt`.
Any thread.
"""

from __future__ import annotations

from ckptgate_adapters.fsspec_ckpt.checkpoint_calls import CheckpointCalls, HeldDirectory
from ckptgate_adapters.fsspec_ckpt.file_calls import FileCalls
from ckptgate_adapters.fsspec_ckpt.name_calls import NameCalls
from ckptgate_adapters.fsspec_ckpt.transaction import CkptTransaction

__all__ = ["CkptFileSystem", "HeldDirectory"]


class CkptFileSystem(NameCalls, FileCalls, CheckpointCalls):
    """Files of a store, with ckptgate's guarantees; options as of `Base`."""

    transaction_type = CkptTransaction
