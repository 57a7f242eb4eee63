"""The end of a multipart upload: completed and proved, or aborted until nothing of it is left.

No answer is believed alone. After a Complete the object is looked at; after a lost answer, or a
"no such upload" (completed or aborted?), what is there under the key decides. Loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ckptgate.errors import CkptError, IntegrityError, MissingError, TransientStoreError
from ckptgate_adapters.s3_store.checksums import encode
from ckptgate_adapters.s3_store.failures import NoSuchUploadError
from ckptgate_adapters.s3_store.proof import Sent, is_ours, prove
from ckptgate_adapters.s3_store.session import Answer, Session

__all__ = ["Upload", "abort", "complete", "look"]

_ABORTS_MAX: Final = 6

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A multipart upload that was begun.

    Attributes:
        key: of the object that it makes.
        id: the service's name for it.
        is_whole: the store said that it keeps one checksum of all, which Complete can demand.
    """

    key: str
    id: str
    is_whole: bool

    @property
    def place(self) -> dict[str, str]:
        """How a request names it."""
        return {"Key": self.key, "UploadId": self.id}


async def look(session: Session, key: str) -> Answer:
    """The object's headers, with its checksum. Raises MissingError."""
    return await session.retried("head_object", Key=key, ChecksumMode="ENABLED")


async def complete(
    session: Session, upload: Upload, parts: Sequence[dict[str, Any]], sent: Sent
) -> bool:
    """Make the object of *parts*; returns what `prove` says of it.

    Raises:
        IntegrityError: the store made something else, or refuses the parts.
        NoSuchUploadError: the upload is gone, and the object isn't its.
        TransientStoreError: nothing is known.
    """
    wanted: dict[str, Any] = {"MpuObjectSize": sent.size}
    if upload.is_whole:
        wanted |= {"ChecksumType": "FULL_OBJECT", "ChecksumCRC64NVME": encode(sent.crc)}
    once = partial(_complete_once, session, upload, list(parts), sent, wanted)
    await session.policy.run(once, f"complete {upload.key}")
    path = session.location.path(upload.key)
    try:
        head = await look(session, upload.key)
    except MissingError as exc:
        msg = f"{path!r} was completed and is not there"
        raise IntegrityError(msg, subject=path) from exc
    return prove(path, head, sent)


async def _complete_once(
    session: Session,
    upload: Upload,
    parts: list[dict[str, Any]],
    sent: Sent,
    wanted: dict[str, Any],
) -> None:
    """Ask once; what the answer leaves open is told by the object."""
    try:
        await session.call(
            "complete_multipart_upload", **upload.place, MultipartUpload={"Parts": parts}, **wanted
        )
    except (NoSuchUploadError, TransientStoreError) as exc:
        try:
            head = await session.call("head_object", Key=upload.key, ChecksumMode="ENABLED")
        except MissingError:
            raise exc from None
        if not is_ours(head, sent):
            raise
        _log.info("s3-complete-had-landed key=%s error=%s", upload.key, exc)


async def abort(session: Session, upload: Upload) -> None:
    """Abort until the store knows of no part: one that was under way may land after an abort.

    Where that can't be had, it is logged: the upload stays listed, and is removed later by its
    age.
    """
    try:
        for tries in range(1, _ABORTS_MAX + 1):
            await session.retried("abort_multipart_upload", **upload.place)
            left = await session.retried("list_parts", **upload.place, MaxParts=1)
            if not left.get("Parts"):
                return
            pause = session.policy.pause_s(tries, TransientStoreError("parts are left"))
            await session.policy.sleep(pause)
    except NoSuchUploadError:
        return
    except CkptError as exc:
        _log.warning("s3-upload-left-behind key=%s upload=%s error=%s", upload.key, upload.id, exc)
        return
    _log.warning("s3-upload-left-behind key=%s upload=%s", upload.key, upload.id)
