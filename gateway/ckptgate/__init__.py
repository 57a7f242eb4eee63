"""ckptgate: a transactional checkpoint gateway. What can be seen is whole.

The public API: `commit`, `wait` and the errors. Everything else is internal.
"""

from __future__ import annotations

from ckptgate.app.api import commit, wait
from ckptgate.errors import CkptError

__all__ = ["CkptError", "__version__", "commit", "wait"]

__version__ = "0.1.0"
