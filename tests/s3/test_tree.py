"""Plain names, copies, uploads, published checkpoints on real servers, seen by another client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import blake3
import pytest
from tests.s3.connected import Connected, connected
from tests.s3.servers import Server

from ckptgate.errors import (
    ExistsError,
    MissingError,
    NotCopiedError,
    RefusedError,
    TransientStoreError,
)
from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    PointerKind,
    PointerValue,
    encode,
)
from ckptgate.model.reclaim import PartKind
from ckptgate.ports.store import PlainKind
from ckptgate.ports.uploads import Uploads
from ckptgate.testing.samples import MTIME_NS, manifest_of, sample_checkpoint, write_file
from ckptgate_adapters.s3_store import S3Store, copying, putting

RUN = "exp/run-7"
MIB = 1024 * 1024


@pytest.fixture(scope="module", params=["seaweed", "mini"])
def on(request: pytest.FixtureRequest) -> Iterator[Connected]:
    server: Server = request.getfixturevalue(request.param)
    with connected(server) as made:
        yield made


@pytest.fixture(scope="module")
def on_mini(mini: Server) -> Iterator[Connected]:
    with connected(mini) as made:
        yield made


class Place:
    """A store, and the bucket as others see it below the same prefix."""

    def __init__(self, on: Connected, **options: Any) -> None:
        self.store: S3Store = on.store(on.place(), **options)
        self.bucket = on.bucket
        self.prefix = self.store.session.location.prefix + "/"

    def put(self, path: str, data: bytes = b"theirs", **words: Any) -> None:
        self.bucket.put(self.prefix + path, data, **words)

    def read(self, path: str) -> bytes:
        return self.bucket.read(self.prefix + path)

    def head(self, path: str) -> dict[str, Any]:
        return self.bucket.client.head_object(Bucket=self.bucket.name, Key=self.prefix + path)

    def listed(self) -> list[str]:
        return [key[len(self.prefix) :] for key in self.bucket.keys(self.prefix)]

    def uploads(self) -> list[str]:
        found = [key for key, _ in self.bucket.uploads() if key.startswith(self.prefix)]
        return [key[len(self.prefix) :] for key in found]

    def begin(self, path: str, *parts: bytes) -> str:
        """An upload that is not completed."""
        place = {"Bucket": self.bucket.name, "Key": self.prefix + path}
        upload = self.bucket.client.create_multipart_upload(**place)["UploadId"]
        for number, data in enumerate(parts, 1):
            self.bucket.client.upload_part(**place, UploadId=upload, PartNumber=number, Body=data)
        return upload


# Names


LEGAL = ["sp ace", "per%20cent", "pl+us", "ünï", "q?a#b&c=d", "quote'\"<>", "\U0001f600", "~", "-x"]


def test_odd_names_are_what_they_are(on: Connected, tmp_path: Path) -> None:
    place = Place(on)
    local = write_file(tmp_path / "f", b"data")
    for name in LEGAL:
        place.store.plain_put(f"d/{name}", local, mode=0o644, mtime_ns=MTIME_NS)
        assert place.read(f"d/{name}") == b"data"
    assert [entry.name for entry in place.store.plain_list("d")] == sorted(LEGAL)
    place.store.plain_rename("d", "e f")
    for name in LEGAL:
        assert place.store.plain_stat(f"e f/{name}").mtime_ns == MTIME_NS
        assert place.store.plain_read(f"e f/{name}", 1, 2) == b"at"
        place.store.plain_remove(f"e f/{name}", is_dir=False)
    assert place.listed() == ["e f/"]


def test_names_that_nothing_can_show_are_left_out_and_told_once(
    on_mini: Connected, caplog: pytest.LogCaptureFixture
) -> None:
    """I13."""
    place = Place(on_mini)
    odd = ["d//double", "d/./dot", "d/../up", "d/new\nline", "d/ctl\x01", "d/" + "n" * 256]
    for key in [*odd, "d/good", "d/sub//x"]:
        place.put(key)
    for _ in range(2):
        assert [entry.name for entry in place.store.plain_list("d")] == ["good", "sub"]
    assert caplog.text.count("name-not-shown") == len(odd)
    assert place.store.plain_list("d/sub") == []
    with pytest.raises(ExistsError, match="not empty"):
        place.store.plain_remove("d/sub", is_dir=True)
    place.store.plain_rename("d", "moved")
    assert place.listed() == sorted(
        key.replace("d/", "moved/", 1) for key in [*odd, "d/good", "d/sub//x"]
    )


def test_of_an_object_and_a_directory_of_one_name_the_directory_is_shown(
    on: Connected, tmp_path: Path
) -> None:
    place = Place(on)
    place.put("a")
    place.put("a/b")
    (entry,) = place.store.plain_list("")
    assert entry == place.store.plain_stat("a")
    assert entry.kind is PlainKind.DIR
    local = write_file(tmp_path / "f", b"mine")
    with pytest.raises(ExistsError):
        place.store.plain_put("a", local, mode=0o644, mtime_ns=0)
    with pytest.raises(ExistsError):
        place.store.plain_rename("a/b", "a")
    assert place.read("a") == place.read("a/b") == b"theirs"
    place.store.plain_rename("a", "c")
    assert place.listed() == ["a", "c/b"]


def test_what_others_stored_has_attributes_too(on: Connected) -> None:
    place = Place(on)
    wrong = {"ckptgate-mode": "99", "ckptgate-mtime": "soon", "ckptgate-type": "socket"}
    place.put("d/plain", b"1234")
    place.put("d/wrong", b"12", Metadata=wrong)
    place.put("d/link", b"plain", Metadata={"ckptgate-type": "symlink"})
    now_ns = datetime.now(UTC).timestamp() * 1e9
    link, plain, wrongly = place.store.plain_list("d")
    assert (plain.kind, plain.size, plain.mode) == (PlainKind.FILE, 4, 0o644)
    assert abs(plain.mtime_ns - now_ns) < 60e9
    assert (plain.uid, plain.gid) == (os.geteuid(), os.getegid())
    assert (wrongly.kind, wrongly.size, wrongly.mode) == (PlainKind.FILE, 2, 0o644)
    assert (link.kind, link.target, link.size) == (PlainKind.SYMLINK, "plain", 5)


def test_a_directory_stays_when_what_was_in_it_goes(on: Connected) -> None:
    place = Place(on)
    place.put("theirs/sub/file")
    place.store.plain_remove("theirs/sub/file", is_dir=False)
    assert [entry.name for entry in place.store.plain_list("theirs")] == ["sub"]
    assert place.store.plain_list("theirs/sub") == []
    place.store.plain_remove("theirs/sub", is_dir=True)
    assert place.store.plain_list("theirs") == []
    with pytest.raises(RefusedError):
        place.store.plain_rename("theirs", "theirs/below")


def test_a_directory_that_is_in_the_place_gets_what_is_renamed_to_it(on: Connected) -> None:
    place = Place(on)
    for path in ("a/x", "a/y", "b/y", "b/z"):
        place.put(path, path.encode())
    place.store.plain_rename("a", "b")
    assert [(key, place.read(key)) for key in place.listed()] == [
        ("b/x", b"a/x"),
        ("b/y", b"a/y"),
        ("b/z", b"b/z"),
    ]


# Bytes


def test_a_large_plain_file_goes_in_parts_and_says_what_it_is(
    on: Connected, tmp_path: Path
) -> None:
    place = Place(on, part_bytes=5 * MIB)
    data = os.urandom(11 * MIB + 5)
    local = write_file(tmp_path / "f", data)
    place.store.plain_put("logs/big", local, mode=0o600, mtime_ns=MTIME_NS)
    assert place.read("logs/big") == data
    told = place.head("logs/big")
    assert told["ETag"].strip('"').endswith("-3")
    assert told["Metadata"]["ckptgate-blake3"] == blake3.blake3(data).hexdigest()
    entry = place.store.plain_stat("logs/big")
    assert (entry.mode, entry.mtime_ns, entry.size) == (0o600, MTIME_NS, len(data))
    assert place.uploads() == []


def test_a_log_that_grows_is_stored_as_it_was_and_one_that_changes_later(
    on_mini: Connected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(on_mini, part_bytes=5 * MIB, tries_max=1)
    data = os.urandom(6 * MIB)
    local = tmp_path / "log"
    local.write_bytes(data)
    read = putting._read
    change: list[Any] = []

    def reading(*args: Any) -> None:
        read(*args)
        change.pop()()

    def grow() -> None:
        with local.open("ab") as file:
            file.write(b"one more line")

    def alter() -> None:
        with local.open("r+b") as file:
            file.write(b"another beginning")

    monkeypatch.setattr(putting, "_read", reading)
    change.append(grow)
    place.store.plain_put("log", str(local), mode=0o644, mtime_ns=0)
    assert place.read("log") == data
    change.append(alter)
    with pytest.raises(TransientStoreError, match="changed while it was stored"):
        place.store.plain_put("log", str(local), mode=0o644, mtime_ns=0)
    assert place.read("log") == data
    assert place.uploads() == []


ODD = "b ïg+%25&'?#.bin"


def test_what_is_too_large_for_one_request_is_copied_in_parts(
    on: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "SINGLE_BYTES_MAX", 5 * MIB)
    place = Place(on)
    data = os.urandom(12 * MIB)
    place.put(f"d/{ODD}", data, Metadata={"theirs": "kept"}, ChecksumAlgorithm="CRC64NVME")
    place.store.plain_rename(f"d/{ODD}", f"e/{ODD}")
    assert place.read(f"e/{ODD}") == data
    assert place.head(f"e/{ODD}")["Metadata"] == {"theirs": "kept"}
    assert place.head(f"e/{ODD}")["ETag"].strip('"').endswith("-3")
    place.store.plain_rename("e", "f")
    assert [key for key in place.listed() if not key.endswith("/")] == [f"f/{ODD}"]
    assert place.read(f"f/{ODD}") == data
    assert place.uploads() == []


# Unfinished uploads


def test_only_uploads_below_the_stores_own_prefix_are_listed_and_aborted(on: Connected) -> None:
    place, other = Place(on), Place(on)
    assert isinstance(place.store, Uploads)
    place.begin(f"{RUN}/.ckptgate/attempts/s.0/data/m-00000000/1", b"x" * 100, b"y")
    place.begin("logs/sp ace+")
    other.begin("not/ours", b"z")
    found = {upload.path: upload for upload in place.store.uploads()}
    assert sorted(found) == [f"{RUN}/.ckptgate/attempts/s.0/data/m-00000000/1", "logs/sp ace+"]
    first = found[f"{RUN}/.ckptgate/attempts/s.0/data/m-00000000/1"]
    assert (first.parts, first.size) == (2, 101)
    assert abs(first.started_at.timestamp() - datetime.now(UTC).timestamp()) < 60
    assert place.store.uploads(older_than_s=3600) == []
    for _ in range(2):
        for upload in found.values():
            place.store.abort_upload(upload)
    assert place.uploads() == []
    assert other.uploads() == ["not/ours"]


def test_an_attempts_unfinished_uploads_are_parts_that_tell_whether_somebody_is_at_them(
    on: Connected,
) -> None:
    place = Place(on)
    key = f"{RUN}/.ckptgate/attempts/s.0/data/m-00000000/1-{'0' * 16}"
    place.begin(key, b"x" * 10)
    place.begin(key)
    place.begin(f"{RUN}/.ckptgate/attempts/s.0/data/m-00000000/theirs")
    place.begin(f"{RUN}/log.txt")
    place.begin(f"{RUN}/sub/copy")
    parts = place.store.attempt_parts(RUN, "s.0")
    assert [part.kind for part in parts] == [PartKind.UNFINISHED] * 2
    assert sorted(part.size for part in parts) == [0, 10]
    assert len({part.key for part in parts}) == 2
    plain = place.store.unfinished(RUN)
    assert sorted(part.key.partition("//")[0] for part in plain) == ["log.txt", "sub/copy"]
    upload = plain[0].key.partition("//upload/")[2]
    path = plain[0].key.partition("//upload/")[0]
    words = {"Bucket": on.bucket.name, "Key": f"{place.prefix}{RUN}/{path}", "UploadId": upload}
    on.bucket.client.upload_part(**words, PartNumber=1, Body=b"more")
    (again,) = [part for part in place.store.unfinished(RUN) if part.key == plain[0].key]
    assert again.stamp != plain[0].stamp
    assert place.store.reclaim_all(RUN, parts).size == 10
    assert place.store.attempt_parts(RUN, "s.0") == []
    assert place.store.reclaim(RUN, again) == 4
    assert place.store.reclaim(RUN, again) == 0
    left = sorted(place.uploads())
    assert left[0].endswith("/theirs")
    assert len(left) == 2


def test_in_a_bucket_with_versions_a_removal_wins_no_bytes(on: Connected, tmp_path: Path) -> None:
    place = Place(on)
    client, name = on.bucket.client, on.bucket.name
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    try:
        sample_checkpoint(place.store, tmp_path, RUN)
        parts = place.store.attempt_parts(RUN, "step-1.0")
        won = place.store.reclaim_all(RUN, parts)
        assert (won.size, dict(won.refused)) == (0, {})
        assert place.store.attempt_parts(RUN, "step-1.0") == []
    finally:
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Suspended"})
        found = client.list_object_versions(Bucket=name, Prefix=place.prefix)
        for item in [*found.get("Versions", []), *found.get("DeleteMarkers", [])]:
            client.delete_object(Bucket=name, Key=item["Key"], VersionId=item["VersionId"])


# What is published


def test_without_ckptgate_a_checkpoint_is_found_by_its_pointer_and_manifest(
    on: Connected, tmp_path: Path
) -> None:
    import json

    place = Place(on)
    manifest, data = sample_checkpoint(place.store, tmp_path, RUN, a=b"1", b=b"22")
    place.store.publish(RUN, manifest, data)
    value = PointerValue(
        pointer="latest", kind=PointerKind.SYMLINK, target="step-1", content="step-1"
    )
    place.store.set_pointer(RUN, value)
    name = place.read(f"{RUN}/latest").decode().strip()
    told = json.loads(place.read(f"{RUN}/{name}/.ckptgate/manifest.json"))
    found = {entry["path"]: place.read(f"{RUN}/{entry['key']}") for entry in told["entries"]}
    assert found == {"a": b"1", "b": b"22"}
    for entry in told["entries"]:
        assert blake3.blake3(found[entry["path"]]).hexdigest() == entry["digest"]


def test_plain_copies_are_whole_where_their_list_is(on: Connected, tmp_path: Path) -> None:
    place = Place(on, plain_copy=True)
    old, old_data = sample_checkpoint(place.store, tmp_path, RUN, a=b"1", b=b"22")
    place.store.publish(RUN, old, old_data)
    shown = f"{RUN}/step-1"
    for line in place.read(f"{shown}/.ckptgate/b3sums").decode().splitlines():
        digest, _, path = line.partition("  ")
        assert blake3.blake3(place.read(f"{shown}/{path}")).hexdigest() == digest
    plain = Place(on)
    plain.store.session.location = place.store.session.location
    new, new_data = sample_checkpoint(place.store, tmp_path, RUN, "step-1.1", c=b"3")
    plain.store.publish(RUN, new, new_data)
    published = [key for key in place.listed() if key.startswith(f"{shown}/")]
    assert published == [f"{shown}/.ckptgate/manifest.json"]
    with pytest.raises(MissingError):
        place.store.plain_stat(f"{shown}/a")


TOO_LONG = "/".join(["n" * 200] * 5)


def test_what_cannot_be_copied_to_its_plain_name_is_published_without_copies(
    on_mini: Connected, tmp_path: Path
) -> None:
    """I8, I13: the manifest leads to all bytes, and no copy is of another attempt."""
    place = Place(on_mini, plain_copy=True)
    old, old_data = sample_checkpoint(place.store, tmp_path, RUN, a=b"1")
    place.store.publish(RUN, old, old_data)
    entries = (
        *old.entries,
        FileEntry(path=TOO_LONG, type=EntryType.DIR, mode=0o755, mtime_ns=MTIME_NS),
    )
    new = manifest_of(RUN, "step-1", "step-1.1", entries)
    for _ in range(2):
        with pytest.raises(NotCopiedError, match=r"S3 takes 1024 at most") as raised:
            place.store.publish(RUN, new, encode(new))
        assert TOO_LONG in str(raised.value)
        assert place.store.published_attempt(RUN, "step-1") == "step-1.1"
        assert place.store.published_problems(RUN, new, encode(new)) == []
    published = [key for key in place.listed() if key.startswith(f"{RUN}/step-1/")]
    assert published == [f"{RUN}/step-1/.ckptgate/manifest.json"]
    assert place.read(f"{RUN}/{old.entries[0].key}") == b"1"
