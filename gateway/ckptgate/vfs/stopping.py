"""Whether a checkpoint may be begun: not while the gateway finishes what is under way.

Owns the rule that only a beginning is refused (a checkpoint's directory, a new version of a whole
file): whoever is in the middle of a save goes on with it, so that a trainer that is told to end can
finish the one it has begun, and remove an old one for it. Any thread.
"""

from __future__ import annotations

import errno
import logging

from ckptgate.errors import RefusedError
from ckptgate.ports.rows import STOP_META, StopNotice
from ckptgate.vfs.context import Context

__all__ = ["check_taking"]

_log = logging.getLogger(__name__)


def check_taking(ctx: Context, path: str) -> None:
    """Return if a checkpoint may be begun at *path*, which is for the log.

    Raises:
        RefusedError: EROFS, the gateway is being stopped or drained.
    """
    notice = StopNotice.parse(ctx.spool.get_meta(STOP_META))
    if not notice.is_refusing(ctx.clock.now_ns()):
        return
    what = "is being stopped" if notice.why == "stop" else "is being drained"
    hint = 'what is begun already may be finished; [stop] new_checkpoints = "allow" takes more'
    _log.warning("checkpoint-refused path=%r reason=%r hint=%r", path, f"the gateway {what}", hint)
    msg = f"no new checkpoints are taken: the gateway {what}"
    raise RefusedError(msg, subject=path, hint=hint, errno_value=errno.EROFS)
