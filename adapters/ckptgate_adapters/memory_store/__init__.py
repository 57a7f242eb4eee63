"""The store in memory, for tests and demonstrations."""

from ckptgate_adapters.memory_store.store import MemoryStore

__all__ = ["MemoryStore"]
