"""Publishers on S3 that come in between: at each request of one, another does all of its own.

There is no lock between nodes; the conditions on what is replaced have to do.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from tests.s3.pretend import Bucket, Faults, PretendSession
from tests.s3.test_tree_faults import LATEST, NEW, OLD, RUN, Tree, manifest, stored

from ckptgate.errors import CkptError, RefusedError, TransientStoreError, UnusableError
from ckptgate.model.documents import Manifest, PointerKind, PointerValue
from ckptgate.model.reclaim import PartKind
from ckptgate_adapters.s3_store import uploads

NEWEST = manifest("step-1.2")


@dataclass
class Interruption:
    """What happens before the *at*-th request, on another thread, as a loop can't be entered."""

    at: int
    do: Callable[[], object]
    count: int = 0
    failed: list[CkptError] = field(default_factory=list)

    def __call__(self, _operation: str) -> None:
        self.count += 1
        if self.count == self.at:
            thread = threading.Thread(target=self._run)
            thread.start()
            thread.join()

    def _run(self) -> None:
        try:
            self.do()
        except CkptError as exc:
            self.failed.append(exc)


def interrupted(
    make: Callable[[], Bucket], do: Callable[[Tree], object], other: Callable[[Tree], object]
) -> list[Bucket]:
    """The bucket for each request of *do* before which *other* came."""
    found: list[Bucket] = []
    for at in range(1, 200):
        bucket = make()
        pause = Interruption(at, partial(other, Tree(PretendSession(bucket))))
        session = PretendSession(bucket, Faults(on_request=pause), tries=3)
        do(Tree(session))
        assert not pause.failed
        if pause.count < at:
            return found
        found.append(bucket)
    raise AssertionError("it never ends")


def shown(bucket: Bucket) -> str:
    return Tree(PretendSession(bucket)).published_attempt(RUN, "step-1")


@pytest.mark.parametrize("is_replacing", [False, True])
def test_a_slow_publisher_never_replaces_a_newer_attempt(is_replacing: bool) -> None:
    """I8: whatever request of the slow one the commit and publication of a newer come before."""

    def make() -> Bucket:
        bucket = stored()
        if is_replacing:
            Tree(PretendSession(bucket)).publish(RUN, *OLD)
        return bucket

    current: list[Manifest] = []

    def newer(tree: Tree) -> None:
        # The log says so before anybody publishes it.
        current.append(NEWEST[0])
        tree.publish(RUN, *NEWEST)

    def slow(tree: Tree) -> None:
        current.clear()
        tree.publish(RUN, *NEW, is_due=lambda: not current)

    buckets = interrupted(make, slow, newer)
    assert len(buckets) >= 5
    assert {shown(bucket) for bucket in buckets} == {"step-1.2"}


def test_two_publishers_of_one_attempt_end_with_it_whole() -> None:
    """I10."""

    def publish(tree: Tree) -> None:
        tree._plain_copy = True
        tree.publish(RUN, *NEW)

    def make() -> Bucket:
        bucket = stored()
        old = Tree(PretendSession(bucket), plain_copy=True)
        old.publish(RUN, *OLD)
        return bucket

    buckets = interrupted(make, publish, publish)
    alone = make()
    publish(Tree(PretendSession(alone)))
    assert len(buckets) >= 20
    for bucket in buckets:
        problems = Tree(PretendSession(bucket)).published_problems(RUN, *NEW)
        assert problems == []
        assert bucket.tree().keys() == alone.tree().keys()


def test_an_attempt_that_is_hidden_late_takes_no_newer_one_along() -> None:
    """I9: its name was saved again meanwhile."""

    def make() -> Bucket:
        bucket = stored()
        Tree(PretendSession(bucket)).publish(RUN, *OLD)
        return bucket

    buckets = interrupted(
        make,
        lambda tree: tree.unpublish(RUN, "step-1", "step-1.0"),
        lambda tree: tree.publish(RUN, *NEW),
    )
    assert {shown(bucket) for bucket in buckets} == {"step-1.1"}


def test_a_pointer_that_two_set_is_one_of_theirs() -> None:
    buckets = interrupted(
        stored,
        lambda tree: tree.set_pointer(RUN, LATEST),
        lambda tree: tree.set_pointer(RUN, LATEST),
    )
    for bucket in buckets:
        assert Tree(PretendSession(bucket)).pointer_content(RUN, "latest") == LATEST.content


def test_what_the_store_locks_is_told_and_keeps_nothing_else() -> None:
    bucket = stored()
    tree = Tree(PretendSession(bucket))
    parts = tree.attempt_parts(RUN, "step-1.0")
    assert [part.kind for part in parts] == [PartKind.DATA] * 2
    bucket.locked.add(f"pre/{RUN}/{parts[0].key}")
    won = tree.reclaim_all(RUN, parts)
    assert list(won.refused) == [parts[0].key]
    assert "AccessDenied" in str(won.refused[parts[0].key])
    assert won.size == parts[1].size
    with pytest.raises(RefusedError, match="locked"):
        tree.reclaim(RUN, parts[0])
    assert [part.key for part in tree.attempt_parts(RUN, "step-1.0")] == [parts[0].key]


def test_a_listing_costs_a_request_for_each_name_once_and_then_one_for_each_directory() -> None:
    bucket = Bucket(page=100)
    for number in range(30):
        bucket.put(f"pre/run/f{number}", b"x")
        bucket.put(f"pre/run/step-{number}/.ckptgate/manifest.json", b"{}")
        bucket.put(f"pre/run/step-{number}/.ckptgate/b3sums", b"")
    tree = Tree(PretendSession(bucket))
    first = tree.plain_list("run")
    assert len(first) == 60
    assert sum(entry.is_managed for entry in first) == 30
    assert bucket.requests.count("head_object") == 30
    assert bucket.requests.count("list_objects_v2") == 31
    bucket.requests.clear()
    assert tree.plain_list("run") == first
    assert bucket.requests == ["list_objects_v2"] * 31


def test_attributes_of_what_was_stored_just_now_are_asked_for_again() -> None:
    """Another version may have the same time and bytes."""
    bucket = Bucket()
    bucket.put("pre/d/f", b"x", **{"ckptgate-mode": "0600"})
    bucket.age_s = 1
    tree = Tree(PretendSession(bucket))
    assert [entry.mode for entry in tree.plain_list("d")] == [0o600]
    bucket.objects["pre/d/f"].metadata["ckptgate-mode"] = "0640"
    assert [entry.mode for entry in tree.plain_list("d")] == [0o640]


class Old(Bucket):
    """A service that knows `If-None-Match`, refuses `If-Match`, and ignores it on a delete."""

    def do(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if operation == "put_object" and "IfMatch" in params:
            raise UnusableError("NotImplemented", subject=params["Key"])
        if operation == "delete_object":
            params = {"Key": params["Key"]}
        return super().do(operation, params)


def test_a_service_without_if_match_is_looked_at_instead() -> None:
    bucket = Old(stored().objects)
    tree = Tree(PretendSession(bucket))
    tree.publish(RUN, *OLD)
    tree.publish(RUN, *NEW)
    assert shown(bucket) == "step-1.1"
    for content in ("step-1", "./step-1"):
        value = PointerValue(
            pointer="latest", kind=PointerKind.SYMLINK, target="step-1", content=content
        )
        tree.set_pointer(RUN, value)
        assert tree.pointer_content(RUN, "latest") == content
    tree.unpublish(RUN, "step-1", "step-1.1")
    assert shown(bucket) == ""


def test_a_single_writer_sends_no_conditions() -> None:
    bucket = stored()
    session = PretendSession(bucket)
    session.options = dataclasses.replace(session.options, single_writer=True)
    sent: list[Mapping[str, Any]] = []
    do = bucket.do

    def watch(operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        sent.append(params)
        return do(operation, params)

    bucket.do = watch  # type: ignore[method-assign]
    tree = Tree(session)
    tree.publish(RUN, *OLD)
    tree.publish(RUN, *NEW)
    tree.set_pointer(RUN, LATEST)
    assert shown(bucket) == "step-1.1"
    assert not any({"IfMatch", "IfNoneMatch"} & params.keys() for params in sent)


def test_an_upload_that_gets_parts_again_and_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_ABORT_WAIT_S", 0.0)
    bucket = Bucket()
    tree = Tree(PretendSession(bucket))
    bucket.do("create_multipart_upload", {"Key": "pre/logs/big", "Metadata": {}})
    monkeypatch.setattr(bucket, "_abort_multipart_upload", lambda **_: {}, raising=False)
    (upload,) = tree.uploads()
    with pytest.raises(TransientStoreError, match="'logs/big' still has parts"):
        tree.abort_upload(upload)
