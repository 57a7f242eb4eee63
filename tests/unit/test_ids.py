"""Names and ids."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.errors import InvalidNameError
from ckptgate.model import ids


@pytest.mark.parametrize("name", ["a", "..a", "...", "x y", "ü" * 127, "n" * 255, "-rf", "a\\b"])
def test_an_unusual_name_is_usable(name: str) -> None:
    assert ids.check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/", "a\nb", "a\0b", "\x1b[31m", "a\x7f", "a\tb"]
)
def test_a_name_that_could_do_harm_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError, match="not usable"):
        ids.check_name(name)


@pytest.mark.parametrize("name", ["n" * 256, "ü" * 128])
def test_a_name_is_measured_in_bytes(name: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        ids.check_name(name)
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_name_that_is_not_utf_8_is_refused_with_its_own_errno() -> None:
    with pytest.raises(InvalidNameError) as caught:
        ids.check_name(b"a\xff".decode("utf-8", "surrogateescape"))
    assert caught.value.errno == errno.EILSEQ


def test_a_checkpoint_s_name_leaves_room_for_a_suffix() -> None:
    assert ids.check_checkpoint_name("n" * 240)
    with pytest.raises(InvalidNameError, match="240"):
        ids.check_checkpoint_name("n" * 241)


@pytest.mark.parametrize("path", ["a", "a/b/c", "a b/ü"])
def test_a_path_below_is_usable(path: str) -> None:
    assert ids.check_relative_path(path) == path


@pytest.mark.parametrize(
    "path", ["", "/a", "a//b", "a/", "../a", "a/../b", "a/./b", "a/\n", "a/.."]
)
def test_a_path_that_could_leave_is_refused(path: str) -> None:
    with pytest.raises(InvalidNameError):
        ids.check_relative_path(path)


def test_a_path_has_a_longest_length() -> None:
    with pytest.raises(InvalidNameError, match="4096") as caught:
        ids.check_relative_path("/".join(["n" * 200] * 21))
    assert caught.value.errno == errno.ENAMETOOLONG


@given(st.text(max_size=30))
def test_a_usable_path_never_leaves_its_directory(path: str) -> None:
    """I13."""
    try:
        ids.check_relative_path(path)
    except InvalidNameError:
        return
    assert not path.startswith("/")
    assert not {"..", ".", ""} & set(path.split("/"))


def test_the_directories_above_a_path_come_outermost_first() -> None:
    assert ids.parents_of("a/b/c") == ["a", "a/b"]
    assert ids.parents_of("a") == []


def test_a_digest_is_64_lower_case_hex_digits() -> None:
    assert ids.check_digest("0f" * 32)
    for text in ("", "0f" * 31, "0F" * 32, "g" * 64, "0f" * 32 + "\n"):
        with pytest.raises(InvalidNameError):
            ids.check_digest(text)


def test_a_member_is_a_host_and_eight_hex_digits() -> None:
    assert ids.check_member_id("gpu-node.12-0a1b2c3d")
    for text in ("0a1b2c3d", "-0a1b2c3d", "h-0a1b2c3", "h/x-0a1b2c3d", "h" * 81 + "-0a1b2c3d"):
        with pytest.raises(InvalidNameError):
            ids.check_member_id(text)


def test_an_attempt_is_a_name_and_a_number() -> None:
    assert ids.make_attempt_id("step-1.5", 3) == "step-1.5.3"
    assert ids.split_attempt_id("step-1.5.3") == ("step-1.5", 3)
    assert ids.check_attempt_id("a.0") == "a.0"


@pytest.mark.parametrize(
    "text", ["", "a", "a.", ".1", "a.01", "a.-1", "a/b.1", "...1", "a.1234567890"]
)
def test_another_text_is_no_attempt(text: str) -> None:
    with pytest.raises(InvalidNameError):
        ids.check_attempt_id(text)


@given(name=st.text(min_size=1, max_size=60), k=st.integers(0, 10**6))
def test_an_attempt_s_id_gives_its_parts_back(name: str, k: int) -> None:
    try:
        attempt = ids.make_attempt_id(name, k)
    except InvalidNameError:
        return
    assert ids.split_attempt_id(attempt) == (name, k)


def test_chunks_are_counted_in_whole() -> None:
    counts = [ids.chunk_count(size) for size in (0, 1, ids.CHUNK_BYTES, ids.CHUNK_BYTES + 1)]
    assert counts == [0, 1, 1, 2]
