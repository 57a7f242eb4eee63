"""Comparing a published directory with the manifest that it is to show, for us and for `b3sum`.

Owns the rule what counts: which names there are, of which type, with which bytes or target. Modes,
owners and times may be what a store can keep. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ckptgate.model.documents import EntryType, FileEntry, Manifest
from ckptgate.model.ids import parents_of

__all__ = ["Shown", "b3sums", "tree_problems"]


@dataclass(frozen=True, slots=True)
class Shown:
    """What is published under one name.

    Attributes:
        type: None for what no checkpoint holds (a socket, a device).
        size: bytes of a file.
        target: of a symlink.
    """

    type: EntryType | None
    size: int = 0
    target: str = ""


def b3sums(entries: Iterable[FileEntry]) -> bytes:
    """The list that `b3sum --check` reads, of all files."""
    lines: list[str] = []
    for entry in entries:
        # b3sum refuses names with a replacement character, so such a line could never check.
        if entry.type is EntryType.FILE and "\ufffd" not in entry.path:
            escaped = entry.path.replace("\\", "\\\\")
            mark = "\\" if escaped != entry.path else ""
            lines.append(f"{mark}{entry.digest}  {escaped}\n")
    return "".join(lines).encode()


def tree_problems(
    manifest: Manifest, found: Mapping[str, Shown], digest: Callable[[FileEntry], str]
) -> list[str]:
    """What is wrong, one line each that begins with the checkpoint's name and the path.

    Args:
        manifest: of the checkpoint.
        found: path -> what is there, without the gateway's own; a directory that the manifest
            doesn't have may come without what is in it.
        digest: BLAKE3 in hex of the published bytes of an entry.
    """
    entries = {entry.path: entry for entry in manifest.entries}
    above = {parent for path in entries for parent in parents_of(path)} - entries.keys()
    problems: list[str] = []
    told: set[str] = set()
    for path in sorted({*entries, *above, *found}):
        if not told.isdisjoint(parents_of(path)):
            # The directory above is not there, or is none, or not the checkpoint's.
            continue
        entry, shown = entries.get(path), found.get(path)
        if entry is None and path not in above:
            problem = "published, but not in the manifest"
        elif shown is None:
            problem = "missing in the published directory"
        else:
            problem = _differs(entry, shown, digest)
        if problem:
            told.add(path)
            problems.append(f"{manifest.name}/{path}: {problem}")
    return problems


def _differs(entry: FileEntry | None, shown: Shown, digest: Callable[[FileEntry], str]) -> str:
    wanted = EntryType.DIR if entry is None else entry.type
    if shown.type is not wanted:
        return f"published as a {shown.type or 'special file'}, committed as a {wanted}"
    if entry is None or wanted is EntryType.DIR:
        return ""
    if wanted is EntryType.SYMLINK:
        is_same = shown.target == entry.target
        return "" if is_same else f"published with target {shown.target!r}, not {entry.target!r}"
    if shown.size != entry.size:
        return f"published with {shown.size} bytes, committed with {entry.size}"
    seen = digest(entry)
    return "" if seen == entry.digest else f"published bytes have digest {seen}, not {entry.digest}"
