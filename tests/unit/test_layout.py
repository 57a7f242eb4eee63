"""Keys in the store."""

from __future__ import annotations

import pytest

from ckptgate.model import layout
from ckptgate.model.ids import check_relative_path

DIGEST = "a" * 64
MEMBER = "node-01234567"
ATTEMPT = "step-7.0"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (layout.format_key("r"), "r/.ckptgate/format.json"),
        (layout.log_prefix("r"), "r/.ckptgate/log"),
        (layout.log_key("r", 42), "r/.ckptgate/log/0000000042.json"),
        (layout.attempts_prefix("r"), "r/.ckptgate/attempts"),
        (layout.attempt_prefix("r", ATTEMPT), "r/.ckptgate/attempts/step-7.0"),
        (layout.intent_key("r", ATTEMPT), "r/.ckptgate/attempts/step-7.0/intent.json"),
        (layout.members_prefix("r", ATTEMPT), "r/.ckptgate/attempts/step-7.0/members"),
        (
            layout.member_key("r", ATTEMPT, MEMBER),
            "r/.ckptgate/attempts/step-7.0/members/node-01234567.json",
        ),
        (
            layout.names_key("r", ATTEMPT, MEMBER, 3),
            "r/.ckptgate/attempts/step-7.0/names/node-01234567/3.json",
        ),
        (
            layout.vote_key("r", ATTEMPT, MEMBER, 0),
            "r/.ckptgate/attempts/step-7.0/votes/node-01234567/0.json",
        ),
        (
            layout.manifest_key("r", ATTEMPT, DIGEST),
            f"r/.ckptgate/attempts/step-7.0/manifest-{DIGEST}.json",
        ),
        (
            layout.data_key(ATTEMPT, MEMBER, 12),
            ".ckptgate/attempts/step-7.0/data/node-01234567/12",
        ),
        (layout.data_name(12, DIGEST), f"12-{DIGEST[:16]}"),
        (layout.chunk_table_key(ATTEMPT, DIGEST), f".ckptgate/attempts/step-7.0/chunks/{DIGEST}"),
    ],
)
def test_a_key_of_format_1_never_changes(key: str, expected: str) -> None:
    assert key == expected


def test_a_run_at_the_root_of_the_store_has_keys_without_a_leading_slash() -> None:
    assert layout.log_key("", 0) == ".ckptgate/log/0000000000.json"
    assert layout.full_key("", layout.data_key(ATTEMPT, MEMBER, "1")).startswith(".ckptgate/")
    # By it a store tells what it may reclaim.
    assert layout.DATA_NAME.fullmatch(layout.data_name(12, "0f" * 32))


def test_a_nested_run_keeps_its_path() -> None:
    assert layout.full_key("a/b", "c/d") == "a/b/c/d"
    assert layout.format_key("a/b") == "a/b/.ckptgate/format.json"


def test_the_log_of_a_run_sorts_by_index() -> None:
    keys = [layout.log_key("r", index) for index in (0, 9, 10, 99_999, 100_000)]
    assert keys == sorted(keys)


def test_joining_skips_empty_parts() -> None:
    assert layout.join_key("", "a", "", "b") == "a/b"
    assert layout.join_key("", "") == ""


def test_keys_pass_the_check_of_paths() -> None:
    for key in (layout.log_key("", 1), layout.vote_key("a/b", ATTEMPT, MEMBER, 1)):
        assert check_relative_path(key) == key
