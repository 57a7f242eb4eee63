"""The store on a local or NFS directory: put-if-absent by link(2), publication by one rename.

Protocol adapter only: it translates calls, bytes and errors, and decides nothing about checkpoints.
"""

from ckptgate_adapters.posix_store.store import PosixStore

__all__ = ["PosixStore"]
