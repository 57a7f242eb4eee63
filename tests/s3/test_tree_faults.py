"""What changes the store's tree on S3 reaches the same state whatever request gets no answer.

Each step is tried with a fault at its first request, its second, ... until none is left: the
request is lost, or its answer, or the process dies there. A repeat then reaches what no fault
reaches (I10), and at no time is anything gone that nobody said should go (I9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from tests.s3.pretend import Bucket, Faults, PretendSession

from ckptgate.errors import CkptError
from ckptgate.model.documents import (
    EntryType,
    FileEntry,
    Manifest,
    PointerKind,
    PointerValue,
    digest_of,
    encode,
)
from ckptgate.model.layout import data_key, full_key
from ckptgate.testing.samples import MEMBER, MTIME_NS, manifest_of
from ckptgate_adapters.s3_store.plain import S3Plain
from ckptgate_adapters.s3_store.publication import S3Publication
from ckptgate_adapters.s3_store.reclaim import S3Reclaim
from ckptgate_adapters.s3_store.uploads import S3Uploads

RUN = "exp/run"
PRECIOUS = b"somebody else's"


class Tree(S3Publication, S3Plain, S3Reclaim, S3Uploads):
    def __init__(self, session: PretendSession, *, plain_copy: bool = False) -> None:
        S3Publication.__init__(self, session)
        S3Plain.__init__(self, session)
        S3Reclaim.__init__(self, session)
        S3Uploads.__init__(self, session)
        self._plain_copy = plain_copy


def manifest(attempt: str, **files: bytes) -> tuple[Manifest, bytes]:
    entries = [
        FileEntry(
            path=path.replace("__", "/"),
            type=EntryType.FILE,
            mode=0o640,
            mtime_ns=MTIME_NS,
            size=len(data),
            digest=digest_of(data),
            key=data_key(attempt, MEMBER, number),
        )
        for number, (path, data) in enumerate(sorted(files.items()))
    ]
    entries.append(FileEntry(path="empty", type=EntryType.DIR, mode=0o750, mtime_ns=MTIME_NS))
    entries.append(
        FileEntry(path="link", type=EntryType.SYMLINK, mode=0o777, mtime_ns=MTIME_NS, target="a")
    )
    made = manifest_of(RUN, "step-1", attempt, entries)
    return made, encode(made)


OLD = manifest("step-1.0", a=b"old a", sub__gone=b"old b")
NEW = manifest("step-1.1", a=b"new a", sub__b=b"new b")
DATA = {
    full_key(f"pre/{RUN}", entry.key): data
    for (made, _), files in ((OLD, (b"old a", b"old b")), (NEW, (b"new a", b"new b")))
    for entry, data in zip((e for e in made.entries if e.key), files, strict=True)
}


def stored() -> Bucket:
    bucket = Bucket()
    for key, data in DATA.items():
        bucket.put(key, data)
    return bucket


def foreign() -> Bucket:
    bucket = stored()
    for name in ("step-1/theirs.bin", "step-1/sub//odd\n", "step-1/.ckptgate/manifest.json"):
        bucket.put(f"pre/{RUN}/{name}", PRECIOUS + name.encode())
    bucket.put(f"pre/{RUN}/step-1", PRECIOUS)
    bucket.put(f"pre/{RUN}/step-1/dir/", b"")
    return bucket


def old_copied() -> Bucket:
    bucket = stored()
    Tree(PretendSession(bucket), plain_copy=True).publish(RUN, *OLD)
    bucket.put(f"pre/{RUN}/step-1/added", PRECIOUS)
    return bucket


def plain() -> Bucket:
    bucket = Bucket(page=2)
    for name in ("d/x", "d/e/y", "d/e/odd//z", "d/e/new\nline", "d/e/pl+us %25"):
        bucket.put(f"pre/{name}", PRECIOUS + name.encode(), mode="kept")
    bucket.put("pre/d/empty/", b"", **{"ckptgate-type": "dir", "ckptgate-mode": "0700"})
    bucket.put("pre/file", PRECIOUS)
    return bucket


def with_parts() -> Bucket:
    bucket = stored()
    attempt = f"pre/{RUN}/.ckptgate/attempts/step-1.0"
    for name in (
        f"members/{MEMBER}.json", f"votes/{MEMBER}/0.json", f"chunks/{'0a' * 32}", "intent.json",
        "theirs", f"data/{MEMBER}/not-ours", f"manifest-{'0' * 64}.json",
    ):  # fmt: skip
        bucket.put(f"{attempt}/{name}", b"x")
    key = f"{attempt}/data/{MEMBER}/9-{'0' * 16}"
    for _ in range(2):
        upload = bucket.do("create_multipart_upload", {"Key": key, "Metadata": {}})["UploadId"]
        bucket.uploads[upload][2][1] = b"part"
    return bucket


def reclaim_all(tree: Tree) -> None:
    for part in tree.attempt_parts(RUN, "step-1.0"):
        tree.reclaim(RUN, part)
    tree.tidy(RUN, "step-1.0")


LATEST = PointerValue(
    pointer="latest", kind=PointerKind.SYMLINK, target="step-1", content="./step-1"
)


@dataclass(frozen=True)
class Step:
    before: Callable[[], Bucket]
    do: Callable[[Tree], object]
    plain_copy: bool = False


STEPS = {
    "publish": Step(stored, lambda tree: tree.publish(RUN, *NEW)),
    "publish-over-foreign": Step(foreign, lambda tree: tree.publish(RUN, *NEW)),
    "publish-over-copies": Step(old_copied, lambda tree: tree.publish(RUN, *NEW)),
    "publish-with-copies": Step(stored, lambda tree: tree.publish(RUN, *NEW), plain_copy=True),
    "copies-over-copies": Step(old_copied, lambda tree: tree.publish(RUN, *NEW), plain_copy=True),
    "unpublish": Step(old_copied, lambda tree: tree.unpublish(RUN, "step-1", "step-1.0")),
    "set-pointer": Step(stored, lambda tree: tree.set_pointer(RUN, LATEST)),
    "rename-file": Step(plain, lambda tree: tree.plain_rename("file", "sub/f")),
    "rename-dir": Step(plain, lambda tree: tree.plain_rename("d", "new/d")),
    "remove": Step(plain, lambda tree: tree.plain_remove("d/x", is_dir=False)),
    "rmdir": Step(plain, lambda tree: tree.plain_remove("d/empty", is_dir=True)),
    "mkdir": Step(plain, lambda tree: tree.plain_mkdir("d/m", 0o700)),
    "symlink": Step(plain, lambda tree: tree.plain_symlink("d/l", "x")),
    "reclaim": Step(with_parts, reclaim_all),
}


def kept(bucket: Bucket) -> set[bytes]:
    """What must be somewhere at any time: others' bytes and the checkpoints'."""
    there = {found.data for found in bucket.objects.values()}
    return {data for data in there if data.startswith(PRECIOUS) or data in DATA.values()}


@contextmanager
def watched(bucket: Bucket, session: PretendSession, may_go: set[bytes]) -> Iterator[None]:
    """At each request all is still somewhere."""
    wanted = kept(bucket) - may_go

    def check(operation: str) -> None:
        assert wanted <= {found.data for found in bucket.objects.values()}, operation

    session.faults.on_request = check
    yield
    check("the end")


MAY_GO = {"remove": {PRECIOUS + b"d/x"}, "reclaim": {b"old a", b"old b"}}


@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize("when", ["before", "after", "crash"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_reaches_the_same_state_whatever_request_fails(
    name: str, when: str, tries: int
) -> None:
    """I9, I10."""
    step = STEPS[name]
    good = step.before()
    step.do(Tree(PretendSession(good), plain_copy=step.plain_copy))
    at = 0
    while True:
        at += 1
        bucket = step.before()
        is_crash = when == "crash"
        faults = Faults(at=at, when="before" if is_crash else when, is_lasting=is_crash)
        session = PretendSession(bucket, faults, tries=tries)
        with watched(bucket, session, MAY_GO.get(name, set())):
            try:
                step.do(Tree(session, plain_copy=step.plain_copy))
                failed = False
            except CkptError:
                failed = True
            assert failed is False or tries == 1 or is_crash, f"request {at}"
            if not faults.is_spent:
                break
            faults.at = 0
            step.do(Tree(session, plain_copy=step.plain_copy))
        assert bucket.tree() == good.tree(), f"request {at}"
        assert bucket.uploads == good.uploads, f"request {at}"
    assert at > 1
