"""Every known layout: a whole one is whole, what is taken away is named, extras change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.formats.builders import MemoryTree
from tests.unit.formats.layouts import LAYOUTS, Layout

from ckptgate.errors import IntegrityError
from ckptgate.formats import registry
from ckptgate.formats.base import BytesView
from ckptgate.formats.containers import check_container
from ckptgate.model.closure import absent_rank_files, is_covered


@pytest.fixture(params=sorted(LAYOUTS), scope="module")
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]()


def missing(layout: Layout, files: dict[str, bytes]) -> set[str]:
    """Paths that something says are missing, too short or damaged."""
    tree = MemoryTree(files)
    known = registry.recognise(files, layout.name)
    if known is None:
        return set(layout.files)
    found = {path for path, data in files.items() if check_container(path, BytesView(data)).problem}
    try:
        expected = registry.expected(known, tree)
    except IntegrityError as exc:
        return found | {exc.subject}
    sizes = tree.files()
    found |= {path for path, size in expected.files.items() if sizes.get(path, -1) < size}
    world = layout.world_size if expected.world_size is None else expected.world_size
    return found | {path for _, path in absent_rank_files(expected, sizes.keys(), world)}


def test_a_whole_one_is_recognised_and_covered(layout: Layout) -> None:
    known = registry.recognise(layout.files, layout.name)
    assert known is not None
    assert known.name == layout.format
    assert registry.by_name(known.name) is known
    expected = registry.expected(known, MemoryTree(layout.files))
    assert expected.format_name == layout.format
    assert expected.is_partial is layout.is_partial
    assert missing(layout, layout.files) == set()
    assert is_covered(expected, MemoryTree(layout.files).files(), layout.world_size)


def test_each_file_that_is_taken_away_is_named(layout: Layout) -> None:
    for path in layout.required:
        rest = {other: data for other, data in layout.files.items() if other != path}
        found = missing(layout, rest)
        assert path in found or path.rpartition("/")[2] in found, path


def test_what_is_optional_may_be_missing(layout: Layout) -> None:
    for path in layout.files.keys() - set(layout.required):
        rest = {other: data for other, data in layout.files.items() if other != path}
        assert missing(layout, rest) == set(), path


def test_each_file_that_is_emptied_is_named(layout: Layout) -> None:
    for path in layout.required:
        assert path in missing(layout, layout.files | {path: b""}), path


def test_legal_extras_change_nothing(layout: Layout) -> None:
    known = registry.recognise(layout.files, layout.name)
    assert known is not None
    before = registry.expected(known, MemoryTree(layout.files))
    more = layout.files | dict.fromkeys(layout.extras, b"{}")
    again = registry.recognise(more, layout.name)
    assert again is known
    after = registry.expected(known, MemoryTree(more))
    assert after.files.keys() - before.files.keys() <= set(more)
    assert is_covered(after, MemoryTree(more).files(), layout.world_size)


def test_the_order_of_names_means_nothing(layout: Layout) -> None:
    known = registry.recognise(list(layout.files), layout.name)
    assert known is registry.recognise(list(reversed(layout.files)), layout.name)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_torn_file_is_named_or_was_no_part_of_the_proof(data: st.DataObject) -> None:
    """I13: whatever is cut off, what comes is an answer or an error that names the file."""
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]()
    path = data.draw(st.sampled_from(sorted(layout.files)))
    whole = layout.files[path]
    # Up to three bytes begin no container, and any program's own file may be so short.
    lengths = [st.just(0)] + ([st.integers(4, len(whole) - 1)] if len(whole) > 4 else [])
    length = data.draw(st.one_of(lengths))
    found = missing(layout, layout.files | {path: whole[:length]})
    # A torn file may hide others that it would have named, but never makes up another problem.
    if path.endswith((".pt", ".pth", ".safetensors", ".metadata", ".json")) and whole:
        assert path in found or path not in layout.required, path


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_hostile_bytes_in_any_file_are_an_answer_or_an_error(data: st.DataObject) -> None:
    """I13"""
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]()
    path = data.draw(st.sampled_from(sorted(layout.files)))
    raw = bytearray(layout.files[path] or b"\0")
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    files = layout.files | {path: bytes(raw)}
    known = registry.recognise(files, layout.name)
    assert known is not None
    tree = MemoryTree(files)
    for ask in (registry.expected, registry.inventory):
        subject = path
        try:
            ask(known, tree)
        except IntegrityError as exc:
            subject = exc.subject
        assert subject in files
