"""Whether what is published under a checkpoint's name still is what its manifest says.

Without plain copies that is the manifest itself; with them (their list is there, or one of them)
every name, type, target and byte. Changes nothing. Coroutines run on the session's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ckptgate.model.documents import MAX_DOCUMENT_BYTES, EntryType, FileEntry, Manifest
from ckptgate.model.ids import parents_of
from ckptgate.model.layout import GATEWAY_DIR, join_key
from ckptgate.model.published import Shown, b3sums, tree_problems
from ckptgate_adapters.s3_store.attributes import ObjectKind
from ckptgate_adapters.s3_store.copying import digest_stored
from ckptgate_adapters.s3_store.directories import MANIFEST_NAME, SUMS_NAME, target_of
from ckptgate_adapters.s3_store.objects import Found, Listed, each, get_small, head, list_all
from ckptgate_adapters.s3_store.session import Session

__all__ = ["audit"]

_LINKS = frozenset({ObjectKind.SYMLINK, ObjectKind.POINTER})
_TARGET_BYTES = 8192


async def audit(session: Session, run: str, manifest: Manifest, manifest_bytes: bytes) -> list[str]:
    """What is wrong with `run/<name>`, one line each."""
    base = session.location.below(join_key(run, manifest.name))
    own = f"{base}{GATEWAY_DIR}/"
    listed = {item.key: item async for item in list_all(session, base) if item.key != base}
    if not listed:
        return [f"{manifest.name}: the published directory is not there"]
    inside = [item for key, item in listed.items() if not key.startswith(own)]
    found = await each(session.options.max_parallel, inside, lambda i: _look(session, i))
    there = [item for item in found if item is not None]
    has_copies = own + SUMS_NAME in listed or any(item.attributes.attempt for item in there)
    wanted = {MANIFEST_NAME: manifest_bytes}
    if has_copies:
        wanted[SUMS_NAME] = b3sums(manifest.entries)
    problems = await _own_problems(session, manifest.name, own, set(listed), wanted)
    shown = _tree(base, there)
    if not has_copies:
        names = sorted({path.partition("/")[0] for path in shown})
        more = "published, but not in the manifest"
        return problems + [f"{manifest.name}/{name}: {more}" for name in names]
    digests = await _digests(session, base, manifest, shown)

    def digest(entry: FileEntry) -> str:
        return digests[entry.path]

    return problems + tree_problems(manifest, shown, digest)


async def _look(session: Session, item: Listed) -> Found | None:
    found = await head(session, item.key)
    if found is not None and found.attributes.kind in _LINKS and found.size <= _TARGET_BYTES:
        return await get_small(session, item.key, _TARGET_BYTES)
    return found


async def _own_problems(
    session: Session, name: str, own: str, keys: Iterable[str], wanted: dict[str, bytes]
) -> list[str]:
    """What is wrong with the gateway's own objects."""
    names = {key[len(own) :] for key in keys if key.startswith(own)} | set(wanted)

    async def problem(file: str) -> str:
        if file not in wanted:
            return "published by others"
        found = await get_small(session, own + file, MAX_DOCUMENT_BYTES)
        is_same = found is not None and found.body == wanted[file]
        return "" if is_same else "not as published"

    seen = [(file, await problem(file)) for file in sorted(names) if file]
    return [f"{name}/{GATEWAY_DIR}/{file}: {what}" for file, what in seen if what]


def _tree(base: str, there: Iterable[Found]) -> dict[str, Shown]:
    """Path -> what is there, with the directories that only a path implies."""
    shown: dict[str, Shown] = {}
    for item in there:
        path = item.key[len(base) :]
        kind = item.attributes.kind
        for above in parents_of(path.rstrip("/")):
            shown[above] = Shown(EntryType.DIR)
        if path.endswith("/"):
            shown[path.rstrip("/")] = Shown(EntryType.DIR)
        elif kind in _LINKS:
            shown.setdefault(path, Shown(EntryType.SYMLINK, target=target_of(kind, item.body)))
        else:
            shown.setdefault(path, Shown(EntryType.FILE, size=item.size))
    return shown


async def _digests(
    session: Session, base: str, manifest: Manifest, shown: dict[str, Shown]
) -> dict[str, str]:
    """Path -> digest of the published bytes, of all files that could be those of the manifest."""
    files = [
        entry.path
        for entry in manifest.entries
        if entry.type is EntryType.FILE
        and (seen := shown.get(entry.path)) is not None
        and (seen.type, seen.size) == (EntryType.FILE, entry.size)
    ]
    gate = asyncio.Semaphore(session.options.max_parallel)

    async def read(path: str) -> str:
        async with gate:
            return await digest_stored(session, base + path)

    digests = await asyncio.gather(*map(read, files))
    return dict(zip(files, digests, strict=True))
