"""The store in memory keeps the store's contract."""

from __future__ import annotations

from ckptgate.ports.store import Store
from ckptgate.testing.store_contract import StoreContract
from ckptgate_adapters.memory_store import MemoryStore


class TestMemoryStore(StoreContract):
    def make_store(self, place: str) -> Store:
        # Two clients of one place share the object: the contents are its own.
        if getattr(self, "_made", None) is None:
            self._made = MemoryStore()
        return self._made
