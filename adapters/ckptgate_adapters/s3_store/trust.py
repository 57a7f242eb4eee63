"""Whether the store's checksums mean anything: asked once, with bytes that don't have theirs.

Some services keep whatever checksum the client claims and give it back: to compare that would
prove nothing. One that refuses a wrong one computes them. Loop only.
"""

from __future__ import annotations

import contextlib
import logging
import uuid

from ckptgate.errors import CkptError
from ckptgate.model.layout import GATEWAY_DIR, join_key
from ckptgate_adapters.s3_store.checksums import crc64, encode
from ckptgate_adapters.s3_store.failures import BadBytesError
from ckptgate_adapters.s3_store.session import Session

__all__ = ["Trust"]

_log = logging.getLogger(__name__)


class Trust:
    """What is known of the store's checksums."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_earned: bool | None = None
        self._has_said = False

    async def is_earned(self) -> bool:
        """Whether the store refuses bytes that don't have the checksum that is said."""
        if self._is_earned is None:
            async with self._session.trial:
                if self._is_earned is None:
                    self._is_earned = await self._try()
        if not self._is_earned:
            self.say("it takes bytes with a wrong one")
        return self._is_earned

    def say(self, why: str) -> None:
        """Log, once, that objects are read back because the store's checksum is no proof."""
        if not self._has_said:
            self._has_said = True
            _log.warning(
                "s3-no-checksum store=%s why=%s: what is stored is read back instead",
                self._session.location.url,
                why,
            )

    async def _try(self) -> bool:
        name = f"probe-{uuid.uuid4().hex}"
        key = self._session.key(join_key(GATEWAY_DIR, name))
        data = b"bytes that don't have the checksum which is said"

        async def once() -> bool:
            try:
                await self._session.call(
                    "put_object", Key=key, Body=data, ChecksumCRC64NVME=encode(crc64(data) ^ 1)
                )
            except BadBytesError:
                return True
            return False

        is_refused = await self._session.policy.run(once, "try a wrong checksum")
        if not is_refused:
            with contextlib.suppress(CkptError):
                await self._session.retried("delete_object", Key=key)
        return is_refused
