"""`PosixStore`: the whole of `ports.store.Store` on a local or network directory.

Each part of the contract has its own module; this one puts them together. Any thread, any number
of processes and machines on the same directory.
"""

from __future__ import annotations

import os
import urllib.parse

from ckptgate.ports.store import VerifyMode
from ckptgate_adapters.posix_store.data import POSIX_MODES, PosixData
from ckptgate_adapters.posix_store.plain import PosixPlain
from ckptgate_adapters.posix_store.probing import probe
from ckptgate_adapters.posix_store.publication import PosixPublication
from ckptgate_adapters.posix_store.reclaim import PosixReclaim
from ckptgate_adapters.posix_store.records import PosixRecords
from ckptgate_adapters.posix_store.root import StoreRoot

__all__ = ["PosixStore"]


class PosixStore(PosixRecords, PosixData, PosixPublication, PosixPlain, PosixReclaim):
    """A store in the directory *root*, local or on a network file system.

    Nothing is touched until the first call; `probe` proves that the directory can be a store.

    Args:
        root: path of the directory.
    """

    def __init__(self, root: str) -> None:
        super().__init__(StoreRoot(os.fspath(root)))

    @property
    def url(self) -> str:
        """`file://` and the absolute path."""
        return "file://" + urllib.parse.quote(self._root.path)

    @property
    def default_verify(self) -> VerifyMode:
        """Read back what another machine keeps; the size will do for a local disk."""
        return VerifyMode.READBACK if self._root.mount.is_network else VerifyMode.SIZE

    @property
    def verify_modes(self) -> frozenset[VerifyMode]:
        """A directory has no checksums of its own."""
        return POSIX_MODES

    def probe(self) -> None:
        """Prove that the directory can be a store; leaves nothing behind."""
        probe(self._root)

    def close(self) -> None:
        """Nothing is kept open between calls."""
