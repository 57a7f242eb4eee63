"""mount.ckptgate: what mount(8) says, in the words of `ckptgate mount`."""

from __future__ import annotations

import pytest

from ckptgate.app.mount_helper import main, mount_words
from ckptgate.errors import UsageError

S = "s3://bucket/p"
BOTH = "config=/etc/ckptgate/a.toml,spool=/nvme,spool_max=500GiB"
BOTH_WORDS = ["--config", "/etc/ckptgate/a.toml", "--spool", "/nvme", "--spool-max", "500GiB"]
COMMA = 'endpoint_url="https://h:1/a,b"'


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/s", "/m"], ["/s", "/m"]),
        (["/s", "/m", "-o", "rw"], ["/s", "/m"]),
        ([S, "/m", "-n", "-o", "rw,_netdev,nofail,x-systemd.automount"], [S, "/m"]),
        (["/s", "/m", "-o", BOTH], [*BOTH_WORDS, "/s", "/m"]),
        (["none", "/m", "-o", "config=/a.toml"], ["--config", "/a.toml", "/m"]),
        (["/s", "/m", "-o", COMMA], ["--endpoint-url", "https://h:1/a,b", "/s", "/m"]),
        (["-v", "/s", "/m", "-t", "ckptgate"], ["/s", "/m"]),
        (["/s", "/m", "-s", "-o", "what=ever"], ["/s", "/m"]),
    ],
)
def test_options_become_those_of_the_command(argv, words):
    assert mount_words(argv) == (words, False)


def test_a_rehearsal_mounts_nothing():
    assert mount_words(["-f", "/s", "/m"]) == (["/s", "/m"], True)
    assert main(["-f", "/s", "/m"]) == 0


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["/s"], "a store and a directory"),
        (["/s", "/m", "/n"], "a store and a directory"),
        (["/s", "/m", "-o", "sopol=/x"], "sopol"),
        (["/s", "/m", "-o", "spool="], "spool needs a value"),
        (["/s", "/m", "-o", "ro"], "cannot be mounted with ro"),
        (["/s", "/m", "-s", "-o", "remount"], "remount"),
        (["/s", "/m", "-r"], "-r"),
        (["/s", "/m", "-o"], "needs a value"),
        (["/s", "/m", "--force"], "--force"),
    ],
)
def test_what_is_not_understood_is_named(argv, named, capsys):
    """I13."""
    with pytest.raises(UsageError, match=named):
        mount_words(argv)
    assert main(argv) == 1
    assert named in capsys.readouterr().err


def test_a_failed_mount_ends_as_mount_expects_it(monkeypatch):
    said: list[list[str]] = []

    def fails(argv: list[str]) -> int:
        said.append(argv)
        return 6

    monkeypatch.setattr("ckptgate.app.cli.main", fails)
    assert main(["/s", "/m", "-o", "_netdev"]) == 32
    assert said == [["mount", "/s", "/m"]]
