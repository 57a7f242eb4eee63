"""What a run's attempts have in the bucket, and its removal: own names only.

An attempt's parts are the objects below its key whose names the gateway gives, and multipart
uploads of such keys that were never completed. There is nothing else to tidy: a directory goes with
what is in it. In a bucket with versions a removal wins no bytes until the bucket's own rule
removes old versions. Any thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Final

from ckptgate.errors import CkptError, RefusedError, UnusableError
from ckptgate.model.ids import check_attempt_id
from ckptgate.model.layout import DATA_NAME, attempt_prefix, attempts_prefix, join_key
from ckptgate.model.reclaim import Part, PartKind
from ckptgate.ports.store import Won
from ckptgate_adapters.s3_store.objects import Listed, delete_each, each, head, list_all, told
from ckptgate_adapters.s3_store.session import Session
from ckptgate_adapters.s3_store.uploads import Started, abort, list_started, progress

__all__ = ["S3Reclaim"]

_UPLOAD: Final = "//upload/"
"""Between the key and the id of an unfinished upload: no name of ours has two slashes."""
_ATTEMPTS: Final = f"/{attempts_prefix('')}/"
"""In the key of what belongs to an attempt, which has parts of its own."""
_MANIFEST: Final = re.compile(r"manifest-[0-9a-f]{64}\.json")
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_NUMBERED: Final = re.compile(r"[0-9]+\.json")
_MEMBER: Final = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{8}")
_MEMBER_FILE: Final = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{8}\.json")

_FLAT: Final[Mapping[str, tuple[re.Pattern[str], PartKind]]] = {
    "chunks": (_DIGEST, PartKind.CHUNKS),
    "members": (_MEMBER_FILE, PartKind.MEMBER),
    "movers": (_MEMBER_FILE, PartKind.NAME_OP),
}
_BY_MEMBER: Final[Mapping[str, tuple[re.Pattern[str], PartKind]]] = {
    "data": (DATA_NAME, PartKind.DATA),
    "names": (_NUMBERED, PartKind.NAME_OP),
    "votes": (_NUMBERED, PartKind.VOTE),
}


class S3Reclaim:
    """`ports.store.Reclamation` on S3."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def attempt_parts(self, run: str, attempt: str) -> list[Part]:
        """All that the store has of an attempt, but its intent."""
        return self._session.run(self._attempt_parts(run, check_attempt_id(attempt)))

    def unfinished(self, directory: str) -> list[Part]:
        """Unfinished uploads of plain files, copies among them, in a directory and below it."""
        return self._session.run(self._unfinished(directory))

    def reclaim(self, run: str, part: Part) -> int:
        """Remove it for good; the bytes that this won."""
        return self._session.run(self._reclaim(run, part))

    def reclaim_all(self, run: str, parts: Sequence[Part]) -> Won:
        """Remove all of them, kind by kind, a thousand in a request."""
        return self._session.run(self._reclaim_all(run, parts))

    def tidy(self, run: str, attempt: str) -> None:
        """Nothing is left: there are no directories."""
        attempt_prefix(run, check_attempt_id(attempt))

    # On the loop

    async def _attempt_parts(self, run: str, attempt: str) -> list[Part]:
        start = self._session.location.below(attempt_prefix(run, attempt))
        below = attempt_prefix("", attempt)
        parts: list[Part] = []
        async for item in list_all(self._session, start):
            name = item.key[len(start) :]
            kind = _kind(name)
            if kind is not None:
                parts.append(_part(join_key(below, name), kind, item))
        started = [
            one
            async for one in list_started(self._session, f"{start}data/")
            if _kind(one.key[len(start) :]) is PartKind.DATA
        ]
        return parts + await self._upload_parts(started, start, f"{below}/")

    async def _unfinished(self, directory: str) -> list[Part]:
        start = self._session.location.below(directory)
        started = [
            one
            async for one in list_started(self._session, start)
            if _ATTEMPTS not in f"/{one.key[len(start) :]}"
        ]
        return await self._upload_parts(started, start, "")

    async def _upload_parts(self, started: Sequence[Started], start: str, below: str) -> list[Part]:
        async def look(one: Started) -> Part | None:
            told = await progress(self._session, one)
            if told is None:
                return None
            key = f"{below}{one.key[len(start) :]}{_UPLOAD}{one.upload_id}"
            stamp = f"{told[0]}-{told[1]}"
            return Part(key=key, kind=PartKind.UNFINISHED, size=told[1], stamp=stamp)

        found = await each(self._session.options.max_parallel, started, look)
        return [part for part in found if part is not None]

    async def _reclaim(self, run: str, part: Part) -> int:
        key, upload = self._place(run, part)
        if upload:
            return await abort(self._session, key, upload)
        if await head(self._session, key) is None:
            return 0
        won = await self._delete(run, [part])
        for refused in won.refused.values():
            raise refused
        return won.size

    async def _reclaim_all(self, run: str, parts: Sequence[Part]) -> Won:
        size = 0
        refused: dict[str, CkptError] = {}
        for _, alike in itertools.groupby(parts, key=lambda part: part.kind):
            objects: list[Part] = []
            for part in alike:
                key, upload = self._place(run, part)
                if not upload:
                    objects.append(part)
                    continue
                try:
                    size += await abort(self._session, key, upload)
                except UnusableError as exc:
                    refused[part.key] = exc
            won = await self._delete(run, objects)
            size += won.size
            refused |= won.refused
        return Won(size=size, refused=refused)

    async def _delete(self, run: str, parts: Sequence[Part]) -> Won:
        """Remove objects; one of which an older version stays wins nothing."""
        keys = {self._place(run, part)[0]: part for part in parts}
        kept, refused = await delete_each(self._session, keys, self._session.options.max_parallel)
        size = sum(part.size for key, part in keys.items() if key not in {*kept, *refused})
        hint = "is it locked, or s3:DeleteObject not allowed?"
        errors = {
            keys[key].key: RefusedError(
                f"the store refuses to remove {told(self._session, key)!r}: {reason}",
                subject=told(self._session, key),
                hint=hint,
            )
            for key, reason in refused.items()
        }
        return Won(size=size, refused=errors)

    def _place(self, run: str, part: Part) -> tuple[str, str]:
        """The key of a part and, of an unfinished upload, its id; only of what is ours."""
        path, _, upload = part.key.partition(_UPLOAD)
        _check_own(part, path, is_upload=bool(upload))
        return self._session.key(join_key(run, path)), upload


def _part(key: str, kind: PartKind, item: Listed) -> Part:
    return Part(key=key, kind=kind, size=item.size, stamp=f"{item.etag}-{item.stored_ns}")


def _kind(name: str) -> PartKind | None:
    """What a name below an attempt is; None if the gateway gives no such name to a part."""
    if _MANIFEST.fullmatch(name):
        return PartKind.MANIFEST
    first, _, rest = name.partition("/")
    if first in _FLAT:
        pattern, kind = _FLAT[first]
        return kind if pattern.fullmatch(rest) else None
    member, _, last = rest.partition("/")
    if first not in _BY_MEMBER or not _MEMBER.fullmatch(member):
        return None
    pattern, kind = _BY_MEMBER[first]
    return kind if pattern.fullmatch(last) else None


def _check_own(part: Part, path: str, *, is_upload: bool) -> None:
    """Refuse what `attempt_parts` and `unfinished` never list."""
    own = f"/{path}"
    kind = _kind(own[len(_ATTEMPTS) :].partition("/")[2]) if own.startswith(_ATTEMPTS) else None
    if (part.kind is PartKind.UNFINISHED) if is_upload else kind is part.kind:
        return
    msg = f"{part.key!r} is not the gateway's to remove"
    raise RefusedError(msg, subject=part.key)
