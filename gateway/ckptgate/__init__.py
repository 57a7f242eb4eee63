"""ckptgate: a transactional checkpoint gateway. What can be seen is whole.

The public API: `checkpoint`, `latest`, `commit`, `wait`, `annotate`, `abort` and the error; below
it `torch`, `lightning`, `deepspeed`, `transformers` and `accelerate` have the frameworks' hooks,
each of which imports its framework. Everything else is internal.
"""

from __future__ import annotations

from ckptgate.app.api import abort, annotate, checkpoint, commit, latest, wait
from ckptgate.errors import CkptError

__all__ = [
    "CkptError",
    "__version__",
    "abort",
    "annotate",
    "checkpoint",
    "commit",
    "latest",
    "wait",
]

__version__ = "0.1.0"
