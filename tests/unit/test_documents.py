"""The codec of stored documents: what it keeps, and what it refuses by name (I13)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.errors import CkptError, FormatVersionError, IntegrityError, InvalidNameError
from ckptgate.model.documents import (
    MAX_POINTER_BYTES,
    ChunkRef,
    Document,
    EntryType,
    Evidence,
    FileEntry,
    Intent,
    Manifest,
    Member,
    NameOp,
    NameOpKind,
    PointerKind,
    PointerValue,
    StoreFormat,
    Vote,
    decode,
    digest_of,
    encode,
)
from ckptgate.model.entries import (
    Abort,
    Close,
    Commit,
    Entry,
    Fence,
    Hold,
    LogRecord,
    Pin,
    Point,
    Published,
    Quarantine,
    Retire,
    Seal,
    SealEvent,
    decode_record,
)
from ckptgate.model.ids import CHUNK_BYTES

DIGEST = "0a" * 32
MEMBER = "node-00000001"
KEY = ".ckptgate/attempts/step-1.0/data/node-00000001/7"
POINTER = PointerValue(pointer="latest", kind=PointerKind.TEXT, target="step-1", content="step-1\n")


def file_entry(path: str = "a.bin", **changes: Any) -> FileEntry:
    fields: dict[str, Any] = {
        "path": path,
        "type": EntryType.FILE,
        "mode": 0o644,
        "mtime_ns": 1,
        "size": 3,
        "digest": DIGEST,
        "key": KEY,
    }
    return FileEntry(**{**fields, **changes})


def symlink(path: str, target: str) -> FileEntry:
    return FileEntry(path=path, type=EntryType.SYMLINK, mode=0o777, mtime_ns=1, target=target)


def directory(path: str) -> FileEntry:
    return FileEntry(path=path, type=EntryType.DIR, mode=0o755, mtime_ns=1)


def manifest(*entries: FileEntry) -> Manifest:
    return Manifest(
        run="run",
        name="step-1",
        attempt="step-1.0",
        generation=1,
        event="explicit",
        created_at="2026-01-01T00:00:00.000Z",
        members=(MEMBER,),
        entries=entries,
    )


def vote(*entries: FileEntry) -> Vote:
    return Vote(attempt="step-1.0", member=MEMBER, n=0, is_final=True, entries=entries)


DOCUMENTS: tuple[Document, ...] = (
    StoreFormat(created_by="ckptgate"),
    Intent(
        attempt="step-1.0",
        job_key="run:x",
        is_shared=True,
        generation=1,
        member=MEMBER,
        created_at="2026-01-01T00:00:00.000Z",
        world_size=8,
    ),
    Member(attempt="step-1.0", member=MEMBER, host="node", joined_at="t", ranks=(0, 1)),
    NameOp(attempt="step-1.0", member=MEMBER, n=0, op=NameOpKind.RENAME, path="a", to="b"),
    NameOp(attempt="step-1.0", member=MEMBER, n=1, op=NameOpKind.ROOT_RENAME, path="", to="c"),
    vote(
        file_entry("big", size=CHUNK_BYTES + 1, chunks=ChunkRef(table="t", start=2)),
        file_entry("x", evidence=Evidence(container="npz", is_valid=True, rank=3)),
    ),
    manifest(directory("d"), symlink("d/z", "ü"), file_entry("d/ü")),
)

DOCUMENT_IDS = [f"{n}-{type(document).__name__}" for n, document in enumerate(DOCUMENTS)]

ENTRIES: tuple[Entry, ...] = (
    Fence(generation=1, job_key="run:x"),
    Seal(attempt="a.0", name="a", generation=1, event=SealEvent.FORMAT, detail="dcp-metadata"),
    Close(attempt="a.0"),
    Commit(attempt="a.0", name="a", manifest=DIGEST, pointers=(POINTER,)),
    Abort(attempt="a.0", reason="deadline", missing=("x",)),
    Published(attempt="a.0"),
    Retire(name="a", attempt="a.0"),
    Point(pointer=POINTER, reason="rollback"),
    Pin(name="a"),
    Hold(reason="audit"),
    Quarantine(name="a", reason="nan"),
)


def record(entry: Entry, index: int = 0, previous: str = "") -> LogRecord:
    return LogRecord(
        index=index, previous=previous, write_id="0" * 32, member=MEMBER, at="t", entry=entry
    )


def edited(document: Document, **changes: Any) -> bytes:
    """Bytes of *document* with fields changed as an editor would, past all checks."""
    fields = json.loads(encode(document))
    fields.update(changes)
    return json.dumps(fields).encode() + b"\n"


def with_entry(**changes: Any) -> bytes:
    """A vote's bytes whose only entry was edited."""
    fields = json.loads(encode(vote(file_entry())))
    fields["entries"][0].update(changes)
    return json.dumps(fields).encode() + b"\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=DOCUMENT_IDS)
def test_a_document_comes_back_as_it_was(document: Document) -> None:
    data = encode(document)
    assert decode(data, type(document), subject="k") == document
    assert encode(decode(data, type(document), subject="k")) == data


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_a_record_comes_back_with_its_kind_of_entry(entry: Entry) -> None:
    data = encode(record(entry))
    found = decode_record(data, index=0, previous="", subject="k")
    assert found.entry == entry
    assert json.loads(data)["entry"]["type"] == type(entry).__name__.upper()


def test_the_bytes_are_canonical_json_with_sorted_keys_and_a_newline() -> None:
    data = encode(StoreFormat(created_by="x"))
    assert data == b'{"created_by":"x","format":1}\n'


@pytest.mark.parametrize("document", DOCUMENTS, ids=DOCUMENT_IDS)
def test_a_torn_document_is_refused_by_name_wherever_it_was_cut(document: Document) -> None:
    """I13."""
    data = encode(document)
    for cut in {0, 1, len(data) // 2, len(data) - 2, len(data) - 1}:
        for torn in (data[:cut], data[:cut] + b"\n" if cut < len(data) - 1 else data[:cut]):
            with pytest.raises(IntegrityError, match="the-key"):
                decode(torn, type(document), subject="the-key")


@pytest.mark.parametrize("document", DOCUMENTS, ids=DOCUMENT_IDS)
def test_an_unknown_field_is_refused(document: Document) -> None:
    with pytest.raises(IntegrityError, match="unknown field `colour`"):
        decode(edited(document, colour="red"), type(document), subject="k")


@pytest.mark.parametrize("version", [0, 2, 10**30])
def test_another_format_version_is_told_apart_from_damage(version: int) -> None:
    data = edited(vote(), format=version, a_field_of_tomorrow=1)
    with pytest.raises(FormatVersionError, match=f"the-key has format {version}") as caught:
        decode(data, Vote, subject="the-key")
    assert caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"null\n",
        b"[]\n",
        b"{}{}\n",
        b'{"format":"1"}\n',
        b'{"format":1.5}\n',
        b'{"format":1,"created_by":7}\n',
        b'{"format":1,"created_by":"\xff"}\n',
        b'{"format":1,"created_by":"\\ud800"}\n',
        b'{"format":1,"x":' + b"[" * 100_000 + b"\n",
        b"\x80\x04\x95.\n",
        b"\0" * 4096 + b"\n",
    ],
    ids=[
        "empty",
        "a-newline",
        "null",
        "a-list",
        "two",
        "version-text",
        "version-float",
        "wrong-type",
        "not-utf-8",
        "lone-surrogate",
        "deeply-nested",
        "a-pickle",
        "zeros",
    ],
)
def test_what_is_no_document_is_refused_by_name(data: bytes) -> None:
    """I13."""
    with pytest.raises(IntegrityError, match="the-key"):
        decode(data, StoreFormat, subject="the-key")


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(IntegrityError, match="k"):
        decode(encode(DOCUMENTS[1]), Member, subject="k")


HOSTILE = ["..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "", "a\nb", "a\0b", "n" * 256]


@pytest.mark.parametrize("after", [{"..": 1}, {MEMBER: -1}, {MEMBER: "1"}, [MEMBER]])
def test_renames_of_no_member_or_of_no_number_are_refused(after: object) -> None:
    with pytest.raises(IntegrityError, match="the-key"):
        decode(edited(vote(), after=after), Vote, subject="the-key")
    op = NameOp(attempt="step-1.0", member=MEMBER, n=0, op=NameOpKind.MKDIR, path="d")
    with pytest.raises(IntegrityError, match="the-key"):
        decode(edited(op, after=after), NameOp, subject="the-key")


@pytest.mark.parametrize("path", HOSTILE)
def test_a_hostile_path_is_refused(path: str) -> None:
    """I13: it is an error of the document when read, of the name when made."""
    for changes in ({"path": path}, {"key": path}):
        with pytest.raises(InvalidNameError):
            file_entry(**changes)
        with pytest.raises(IntegrityError, match="the-key"):
            decode(with_entry(**changes), Vote, subject="the-key")


@pytest.mark.parametrize("path", [path for path in HOSTILE if path])
def test_a_hostile_path_is_refused_in_every_place(path: str) -> None:
    with pytest.raises(InvalidNameError):
        ChunkRef(table=path, start=0)
    with pytest.raises(InvalidNameError):
        NameOp(attempt="a.0", member=MEMBER, n=0, op=NameOpKind.MKDIR, path=path)
    with pytest.raises(InvalidNameError):
        NameOp(attempt="a.0", member=MEMBER, n=0, op=NameOpKind.RENAME, path="x", to=path)
    with pytest.raises(InvalidNameError):
        NameOp(attempt="a.0", member=MEMBER, n=0, op=NameOpKind.ROOT_RENAME, path="", to=path)


@pytest.mark.parametrize("name", ["..", "a/b", "", "a\nb", "\x1b[2J", "n" * 241])
def test_a_hostile_checkpoint_name_is_refused_in_every_entry(name: str) -> None:
    for make in (
        lambda: Seal(attempt="a.0", name=name, generation=1, event=SealEvent.RENAME),
        lambda: Commit(attempt="a.0", name=name, manifest=DIGEST),
        lambda: Retire(name=name, attempt="a.0"),
        lambda: Pin(name=name),
        lambda: Quarantine(name=name),
        lambda: PointerValue(pointer="p", kind=PointerKind.TEXT, target=name, content="x"),
        lambda: Close(attempt=f"{name}.0"),
        lambda: Abort(attempt=f"{name}.0", reason=""),
        lambda: Published(attempt=f"{name}.0"),
    ):
        with pytest.raises(InvalidNameError):
            make()


@pytest.mark.parametrize("name", ["..", "../../etc/cron.d/x", "/x", "", "a\nb", "n" * 256])
def test_a_pointer_cannot_lie_outside_its_run(name: str) -> None:
    data = edited(record(ENTRIES[7]), entry={"type": "POINT", "reason": "", "pointer": {
        "pointer": name, "kind": "symlink", "target": "a", "content": "a"}})  # fmt: skip
    with pytest.raises(IntegrityError, match="the-key"):
        decode_record(data, index=0, previous="", subject="the-key")


@pytest.mark.parametrize(
    ("kind", "content", "is_usable"),
    [
        (PointerKind.TEXT, "", True),
        (PointerKind.TEXT, "x" * MAX_POINTER_BYTES, True),
        (PointerKind.TEXT, "x" * (MAX_POINTER_BYTES + 1), False),
        (PointerKind.SYMLINK, "/mnt/run/step-1", True),
        (PointerKind.SYMLINK, "", False),
        (PointerKind.SYMLINK, "a\0b", False),
    ],
)
def test_a_pointer_s_content_has_bounds(kind: PointerKind, content: str, is_usable: bool) -> None:
    def make() -> PointerValue:
        return PointerValue(pointer="latest", kind=kind, target="step-1", content=content)

    if is_usable:
        assert make().content == content
    else:
        with pytest.raises(InvalidNameError, match="content"):
            make()


@pytest.mark.parametrize("target", ["b", "../b", "../c/d", ".", "./x", "a/../b", "..//x"])
def test_a_symlink_may_stay_inside(target: str) -> None:
    assert symlink("d/link", target).target == target


@pytest.mark.parametrize(
    "target", ["", "/etc/passwd", "../../x", "a/../../../x", "../..", "x\0", "../../d/link"]
)
def test_a_symlink_that_leaves_the_checkpoint_is_refused(target: str) -> None:
    """I13."""
    with pytest.raises(InvalidNameError, match="leaves the checkpoint"):
        symlink("d/link", target)


def test_a_path_through_a_symlink_or_file_is_refused_in_a_manifest() -> None:
    """I13: written in order, it could leave the checkpoint."""
    for above in (symlink("a", "b"), file_entry("a")):
        for below in ("a/x", "a/b/x"):
            with pytest.raises(InvalidNameError, match="no directory"):
                manifest(above, file_entry(below))


def test_a_manifest_has_nothing_in_the_gateway_s_own_directory() -> None:
    with pytest.raises(InvalidNameError, match="ckptgate"):
        manifest(file_entry(".ckptgate/manifest.json"))


def test_a_manifest_lists_every_path_once_and_in_order() -> None:
    for paths in (("b", "a"), ("a", "a")):
        with pytest.raises(InvalidNameError, match="twice or out of order"):
            manifest(*map(file_entry, paths))


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "abc"},
        {"digest": ""},
        {"size": -1},
        {"size": CHUNK_BYTES + 1},
        {"chunks": {"table": "t", "start": 0}},
        {"size": 2**63, "chunks": {"table": "t", "start": 0}},
        {"size": 2**62, "chunks": {"table": "t", "start": -1}},
        {"mode": 0o20000},
        {"mtime_ns": 2**64},
        {"uid": -1},
        {"type": "device"},
        {"evidence": {"rank": 10**9}},
    ],
    ids=str,
)
def test_an_impossible_value_is_refused(changes: dict[str, Any]) -> None:
    """I13: a huge index or size must not reach a database or a loop."""
    with pytest.raises(IntegrityError, match="the-key"):
        decode(with_entry(**changes), Vote, subject="the-key")


@pytest.mark.parametrize("size", [0, -1, 10**9])
def test_an_impossible_world_size_is_refused(size: int) -> None:
    with pytest.raises(IntegrityError, match="world_size"):
        decode(edited(vote(), world_size=size), Vote, subject="k")


def test_a_0_byte_file_is_legal() -> None:
    assert decode(with_entry(size=0), Vote, subject="k").entries[0].size == 0


def test_a_record_in_another_s_slot_is_refused() -> None:
    """I7."""
    data = encode(record(ENTRIES[0], index=3, previous=DIGEST))
    assert decode_record(data, index=3, previous=DIGEST, subject="k").index == 3
    with pytest.raises(IntegrityError, match="says index 3, its slot is 4"):
        decode_record(data, index=4, previous=DIGEST, subject="k")


def test_a_record_after_an_edited_one_is_refused() -> None:
    """I7."""
    first = encode(record(ENTRIES[0]))
    second = encode(record(ENTRIES[1], index=1, previous=digest_of(first)))
    decode_record(second, index=1, previous=digest_of(first), subject="k")
    changed = first.replace(b"run:x", b"run:y")
    with pytest.raises(IntegrityError, match="does not follow") as caught:
        decode_record(second, index=1, previous=digest_of(changed), subject="k")
    assert caught.value.hint


def test_a_record_with_an_entry_of_an_unknown_kind_is_refused() -> None:
    data = edited(record(ENTRIES[0]), entry={"type": "DELETE-ALL"})
    with pytest.raises(IntegrityError, match="DELETE-ALL"):
        decode_record(data, index=0, previous="", subject="k")


def test_an_entry_s_unknown_field_is_refused() -> None:
    data = edited(record(ENTRIES[2]), entry={"type": "CLOSE", "attempt": "a.0", "force": True})
    with pytest.raises(IntegrityError, match="force"):
        decode_record(data, index=0, previous="", subject="k")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_end_in_an_error_of_ours(data: bytes) -> None:
    """I13."""
    for kind in (StoreFormat, Vote, Manifest, LogRecord):
        with pytest.raises(CkptError):
            decode(data + b"\n", kind, subject="k")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@given(field=st.sampled_from(sorted(json.loads(encode(vote(file_entry()))))), value=JSON)
def test_a_vote_with_one_field_edited_is_a_vote_or_an_error_of_ours(field: str, value: Any) -> None:
    """I13."""
    data = edited(vote(file_entry()), **{field: value})
    try:
        found = decode(data, Vote, subject="k")
    except CkptError:
        return
    assert decode(encode(found), Vote, subject="k") == found


def test_documents_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        vote().n = 1  # type: ignore[misc]
    assert msgspec.structs.replace(vote(), n=1).n == 1
