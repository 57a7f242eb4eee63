"""`with fs.transaction:` one seal for all that was written in it, or nothing of it.

A file that was opened in a transaction is finished at its end, in the order of the opens; then this
rank commits each checkpoint that any of them lies in. An exception discards them all. One thread.
"""

from __future__ import annotations

from typing import Any

from ckptgate_adapters.fsspec_ckpt.untyped import Transaction

__all__ = ["CkptTransaction"]


class CkptTransaction(Transaction):  # type: ignore[misc]  # fsspec is untyped
    """fsspec's transaction, with the seal."""

    def complete(self, commit: bool = True) -> None:
        """Finish or discard all files; then seal.

        Raises:
            OSError: a file or a checkpoint could not be finished: the rest is discarded.
        """
        fs: Any = self.fs
        paths: list[str] = [file.path for file in self.files]
        Transaction.complete(self, commit)
        if commit:
            found: list[str] = [fs.checkpoint_of(path) for path in paths]
            for checkpoint in dict.fromkeys(found):
                if checkpoint:
                    fs.commit(checkpoint)
