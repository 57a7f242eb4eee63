"""The store in memory: the same contract as a real one, for tests and demonstrations.

One tree of nodes, as on a disk; strict where a real store would be lenient: every call checks its
names, and nothing is created without its bytes being complete. Any thread; one lock.
"""

from __future__ import annotations

import contextlib
import errno
import stat
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import blake3

from ckptgate.errors import (
    ExistsError,
    IntegrityError,
    MissingError,
    UnusableError,
)
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    EntryType,
    FileEntry,
    Manifest,
    PointerKind,
    PointerValue,
    StoreFormat,
    decode,
)
from ckptgate.model.ids import check_attempt_id, check_name, check_relative_path
from ckptgate.model.layout import GATEWAY_DIR, attempt_prefix, format_key, full_key, join_key
from ckptgate.model.published import Shown, tree_problems
from ckptgate.model.reclaim import Part
from ckptgate.ports.store import (
    DigestedFile,
    PlainEntry,
    PlainKind,
    VerifyMode,
    Won,
    always,
    put_each,
    reclaim_each,
)
from ckptgate_adapters.memory_store import checks
from ckptgate_adapters.memory_store.checks import check_plain, compare, read_local, shown_attempt
from ckptgate_adapters.memory_store.nodes import MANIFEST, Node, Nodes
from ckptgate_adapters.memory_store.parts import check_own, parts_of

__all__ = ["MemoryStore"]


class MemoryStore(Nodes):
    """A store that lives as long as this object; share the object to share the store."""

    def __init__(self) -> None:
        super().__init__()
        self._run_locks: dict[str, threading.Lock] = {}

    # Records

    def create(self, key: str, data: bytes) -> None:
        """Store *data* under *key* if nothing is there; equal bytes there are success."""
        check_relative_path(key)
        with self._lock:
            there = self._nodes.get(key)
            if there is not None and (there.kind is not PlainKind.FILE or there.data != data):
                msg = f"other bytes are already stored under {key!r}"
                raise ExistsError(msg, subject=key)
            if there is None:
                self._add(key, Node(kind=PlainKind.FILE, data=bytes(data)))

    def get(self, key: str, *, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
        """The bytes under *key*."""
        data = self._file(check_relative_path(key)).data
        if len(data) > limit:
            msg = f"{key!r} is larger than {limit} bytes"
            raise IntegrityError(msg, subject=key)
        return data

    def children(self, prefix: str) -> list[str]:
        """Names directly below *prefix*, sorted."""
        if prefix:
            check_relative_path(prefix)
        with self._lock:
            return self._names(prefix)

    # Data objects

    def put(self, key: str, source: DigestedFile) -> None:
        """Store the file under *key*."""
        check_relative_path(key)
        data = read_local(source.path)
        if len(data) != source.size:
            msg = f"{source.path!r} has {len(data)} bytes, it is said to have {source.size}"
            raise IntegrityError(msg, subject=source.path)
        with self._lock:
            self._add(key, Node(kind=PlainKind.FILE, data=data))

    def verify(self, key: str, source: DigestedFile, mode: VerifyMode) -> None:
        """Prove that *key* holds exactly the bytes of *source*."""
        checks.check_mode(mode)
        data = self._file(check_relative_path(key)).data
        if len(data) != source.size:
            msg = f"{key!r} has {len(data)} bytes in the store, wanted {source.size}"
            raise IntegrityError(msg, subject=key)
        if mode is VerifyMode.READBACK:
            compare(key, data, source)

    def put_all(self, files: Mapping[str, DigestedFile], mode: VerifyMode) -> dict[str, OSError]:
        """`put` and `verify` each."""
        checks.check_mode(mode)
        return put_each(self, files, mode)

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset*."""
        return self._file(check_relative_path(key)).data[offset : offset + length]

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        """Up to as many bytes at *offset* as *view* has."""
        data = self.read(key, offset, len(view))
        view[: len(data)] = data
        return len(data)

    def local_path(self, key: str) -> str | None:
        """None: nothing of it is in the local file system."""
        check_relative_path(key)
        return None

    # Publication

    def publish(
        self,
        run: str,
        manifest: Manifest,
        manifest_bytes: bytes,
        *,
        is_due: Callable[[], bool] = always,
    ) -> None:
        """Make `run/<name>` show exactly *manifest*, replacing any earlier attempt's."""
        while True:
            shown = self.published_attempt(run, manifest.name)
            if shown == manifest.attempt or not is_due():
                return
            if self._publish_over(shown, run, manifest, manifest_bytes):
                return

    def _publish_over(self, shown: str, run: str, manifest: Manifest, data: bytes) -> bool:
        """Publish it if *shown* still is what is there."""
        with self._lock:
            place = join_key(run, manifest.name)
            if self.published_attempt(run, manifest.name) != shown:
                return False
            tree = self._tree(run, manifest, data)
            if place in self._nodes:
                if shown:
                    self._move(place, self._fresh(attempt_prefix(run, shown), "replaced-"))
                else:
                    displaced = join_key(run, GATEWAY_DIR, "displaced")
                    self._move(place, self._fresh(displaced, f"{manifest.name}-"))
            self._add(place, Node(kind=PlainKind.DIR, mode=0o755))
            for path, node in tree.items():
                self._add(join_key(place, path), node)
            return True

    def published_attempt(self, run: str, name: str) -> str:
        """The attempt that `run/<name>` shows now, or ""."""
        with self._lock:
            node = self._nodes.get(join_key(run, check_name(name), MANIFEST))
        return "" if node is None else shown_attempt(node.data)

    def published_problems(self, run: str, manifest: Manifest, manifest_bytes: bytes) -> list[str]:
        """How `run/<name>` differs from what *manifest* says, one line each."""
        place = join_key(run, check_name(manifest.name))
        with self._lock:
            if place not in self._nodes:
                return [f"{manifest.name}: the published directory is not there"]
            below = f"{place}/"
            found = {k[len(below) :]: n for k, n in self._nodes.items() if k.startswith(below)}
        own = found.pop(MANIFEST, None)
        found.pop(GATEWAY_DIR, None)
        problems = [] if own and own.data == manifest_bytes else [f"{place}: not its manifest"]
        shown = {
            path: Shown(EntryType(node.kind.value), len(node.data), node.target)
            for path, node in found.items()
        }

        def digest(entry: FileEntry) -> str:
            return blake3.blake3(found[entry.path].data).hexdigest()

        return problems + tree_problems(manifest, shown, digest)

    def unpublish(self, run: str, name: str, attempt: str) -> None:
        """Hide `run/<name>` if it shows *attempt*; the bytes stay."""
        check_attempt_id(attempt)
        with self._lock:
            if self.published_attempt(run, name) == attempt:
                self._move(
                    join_key(run, name), self._fresh(attempt_prefix(run, attempt), "retired-")
                )

    def set_pointer(self, run: str, value: PointerValue) -> None:
        """Make `run/<pointer>` be *value*."""
        key = join_key(run, check_name(value.pointer))
        if value.kind is PointerKind.SYMLINK:
            node = Node(kind=PlainKind.SYMLINK, target=value.content, mode=0o777)
        else:
            node = Node(kind=PlainKind.FILE, data=value.content.encode())
        with self._lock:
            self._add(key, node)

    def remove_pointer(self, run: str, pointer: str) -> None:
        """Remove the pointer if it is there."""
        with self._lock:
            self._nodes.pop(join_key(run, check_name(pointer)), None)

    def pointer_content(self, run: str, pointer: str) -> str | None:
        """The symlink's target or the text now under that name, None if there is none."""
        with self._lock:
            node = self._nodes.get(join_key(run, check_name(pointer)))
        if node is None or node.kind is PlainKind.DIR:
            return None
        return node.target if node.kind is PlainKind.SYMLINK else node.data.decode()

    @contextmanager
    def lock_run(self, run: str) -> Generator[None]:
        """One publisher of this run at a time."""
        with self._lock:
            lock = self._run_locks.setdefault(run, threading.Lock())
        with lock:
            yield

    # Plain names

    def plain_stat(self, path: str) -> PlainEntry:
        """What is there now."""
        check_plain(path)
        with self._lock:
            if not path:
                return self._entry("", Node(kind=PlainKind.DIR, mode=0o755))
            return self._entry(path, self._node(path))

    def plain_list(self, path: str) -> list[PlainEntry]:
        """The directory's entries, sorted by name."""
        check_plain(path)
        with self._lock:
            if path and self._node(path).kind is not PlainKind.DIR:
                msg = f"{path!r} is not a directory"
                raise UnusableError(msg, subject=path, errno_value=errno.ENOTDIR)
            names = [name for name in self._names(path) if name != GATEWAY_DIR]
            return [self._entry(join_key(path, n), self._nodes[join_key(path, n)]) for n in names]

    def plain_read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a plain file."""
        check_plain(path)
        return self._file(path).data[offset : offset + length]

    def plain_put(self, path: str, source: str, *, mode: int, mtime_ns: int) -> None:
        """Replace the file *path* by a copy of the local file *source*."""
        check_plain(path)
        node = Node(kind=PlainKind.FILE, data=read_local(source), mode=mode, mtime_ns=mtime_ns)
        with self._lock:
            self._add(check_relative_path(path), node)

    def plain_mkdir(self, path: str, mode: int) -> None:
        """Make a directory; an existing one is success."""
        check_plain(path)
        with self._lock:
            there = self._nodes.get(check_relative_path(path))
            if there is None:
                self._add(path, Node(kind=PlainKind.DIR, mode=mode))
            elif there.kind is not PlainKind.DIR:
                msg = f"{path!r} is there and no directory"
                raise ExistsError(msg, subject=path)

    def plain_symlink(self, path: str, target: str) -> None:
        """Make or replace a symlink."""
        check_plain(path)
        with self._lock:
            node = Node(kind=PlainKind.SYMLINK, target=target, mode=0o777)
            self._add(check_relative_path(path), node)

    def plain_remove(self, path: str, *, is_dir: bool) -> None:
        """Remove a file, symlink or empty directory; nothing there is success."""
        check_plain(path)
        with self._lock:
            there = self._nodes.get(check_relative_path(path))
            if there is None:
                return
            if (there.kind is PlainKind.DIR) != is_dir:
                msg = f"cannot remove {path!r}: it is a {there.kind}"
                code = errno.ENOTDIR if is_dir else errno.EISDIR
                kind = UnusableError if is_dir else ExistsError
                raise kind(msg, subject=path, errno_value=code)
            if self._names(path):
                msg = f"cannot remove {path!r}: it is not empty"
                raise ExistsError(msg, subject=path, errno_value=errno.ENOTEMPTY)
            del self._nodes[path]

    def plain_rename(self, old: str, new: str) -> None:
        """Rename; *old* missing and *new* there is success."""
        check_plain(old)
        check_plain(new)
        with self._lock:
            if check_relative_path(old) in self._nodes:
                self._check_replace(new)
                self._move(old, check_relative_path(new))
            else:
                self._node(new)

    # Reclamation

    def attempt_parts(self, run: str, attempt: str) -> list[Part]:
        """All that the store has of an attempt, but its intent."""
        with self._lock:
            files = {k: len(n.data) for k, n in self._nodes.items() if n.kind is PlainKind.FILE}
        return parts_of(files, run, attempt)

    def unfinished(self, directory: str) -> list[Part]:
        """None: every write is whole."""
        if directory:
            check_relative_path(directory)
        return []

    def reclaim(self, run: str, part: Part) -> int:
        """Remove it; the bytes that this won."""
        check_own(part)
        key = check_relative_path(join_key(run, part.key))
        with self._lock:
            found = [k for k in self._nodes if k == key or k.startswith(f"{key}/")]
            return sum(len(self._nodes.pop(k).data) for k in found)

    def reclaim_all(self, run: str, parts: Sequence[Part]) -> Won:
        """`reclaim` each."""
        return reclaim_each(self, run, parts)

    def tidy(self, run: str, attempt: str) -> None:
        """Remove directories of the attempt that are empty now."""
        below = attempt_prefix(run, check_attempt_id(attempt)) + "/"
        with self._lock:
            for key in sorted((k for k in self._nodes if k.startswith(below)), reverse=True):
                if self._nodes[key].kind is PlainKind.DIR and not self._names(key):
                    del self._nodes[key]

    # The store itself

    @property
    def url(self) -> str:
        """A name for messages."""
        return "memory:"

    @property
    def default_verify(self) -> VerifyMode:
        """Reading memory back costs nothing."""
        return VerifyMode.READBACK

    @property
    def verify_modes(self) -> frozenset[VerifyMode]:
        """It keeps no checksums."""
        return checks.MODES

    def probe(self) -> None:
        """It always can; only another format version is refused."""
        with contextlib.suppress(MissingError):
            decode(self.get(format_key("")), StoreFormat, subject=format_key(""))

    def close(self) -> None:
        """It lives as long as somebody has it."""

    # For tests

    def keys(self) -> list[str]:
        """Every file's key, sorted, the gateway's own among them."""
        with self._lock:
            return sorted(k for k, node in self._nodes.items() if node.kind is PlainKind.FILE)

    def tamper(self, key: str, data: bytes) -> None:
        """Replace the bytes under *key*, as a broken disk would."""
        with self._lock:
            self._nodes[key] = replace(self._file(key), data=data)

    def _tree(self, run: str, manifest: Manifest, manifest_bytes: bytes) -> dict[str, Node]:
        tree = {entry.path: self._published(run, entry) for entry in manifest.entries}
        tree[MANIFEST] = Node(kind=PlainKind.FILE, data=manifest_bytes)
        return tree

    def _published(self, run: str, entry: FileEntry) -> Node:
        node = Node(
            kind=PlainKind(entry.type.value),
            target=entry.target,
            mode=0o777 if entry.type is EntryType.SYMLINK else stat.S_IMODE(entry.mode),
            mtime_ns=entry.mtime_ns,
            uid=entry.uid,
            gid=entry.gid,
        )
        if entry.type is not EntryType.FILE:
            return node
        data = self._file(full_key(run, entry.key)).data
        if len(data) != entry.size:
            msg = f"{entry.key!r} has {len(data)} bytes in the store, wanted {entry.size}"
            raise IntegrityError(msg, subject=entry.key)
        return replace(node, data=data)
