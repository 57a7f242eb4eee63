"""The directory store on full, read-only and unsuitable disks, and raced by several processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from tests.fault.posix_breaker import (
    RUN,
    check_kept,
    occupy,
    rich_checkpoint,
    snapshot,
    temps,
)

from ckptgate.errors import (
    FullError,
    MissingError,
    UnusableError,
)
from ckptgate.ports.store import VerifyMode
from ckptgate.testing.samples import digested
from ckptgate_adapters.posix_store import PosixStore, syscalls


def test_a_full_store_refuses_loudly_and_shows_nothing_of_it(tmpfs: Path, tmp_path: Path) -> None:
    """I11: a full disk loses nothing: the staged bytes stay, and the same call succeeds later."""
    local = tmp_path / "f"
    data = os.urandom(900_000)
    local.write_bytes(data)
    source = digested(str(local))
    store = PosixStore(str(tmpfs))
    filler = tmpfs / "filler"
    filler.write_bytes(b"x" * 400_000)
    with pytest.raises(FullError) as raised:
        store.put("exp/data/1", source)
    assert raised.value.subject == "exp/data/1"
    assert store.children("exp/data") == []
    assert temps(tmpfs) == []
    with filler.open("ab", buffering=0) as more, pytest.raises(OSError, match="No space"):
        while True:
            more.write(b"x" * 4096)
    with pytest.raises(FullError):
        store.create("exp/log/0", b"record")
    with pytest.raises(UnusableError, match="full") as full:
        store.probe()
    assert "df -h" in full.value.hint
    with pytest.raises(MissingError):
        store.get("exp/log/0")
    assert temps(tmpfs) == []
    filler.unlink()
    store.put("exp/data/1", source)
    store.create("exp/log/0", b"record")
    store.verify("exp/data/1", source, VerifyMode.READBACK)
    store.probe()


def test_a_read_only_store_is_unusable_for_writing_and_still_read(
    tmpfs: Path, tmp_path: Path
) -> None:
    local = tmp_path / "f"
    local.write_bytes(b"x")
    store = PosixStore(str(tmpfs))
    store.create("a/b", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    for call in (
        lambda: store.create("a/c", b"x"),
        lambda: store.put("a/c", digested(str(local))),
        lambda: store.plain_mkdir("d", 0o755),
    ):
        with pytest.raises(UnusableError, match=r"[Rr]ead-only"):
            call()
    with pytest.raises(UnusableError, match="read-only") as raised:
        store.probe()
    assert raised.value.hint.startswith("mount -o remount,rw")
    assert store.get("a/b") == b"x"
    store.create("a/b", b"x")


def test_a_store_without_hard_links_is_refused_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(syscalls, "link", refuse)
    with pytest.raises(UnusableError, match=r"link\(2\)"):
        PosixStore(str(tmp_path)).probe()
    assert list(tmp_path.iterdir()) == []


def test_a_store_whose_links_replace_what_is_there_is_refused_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I7: without put-if-absent there is no log."""

    def replace(source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.rename(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(syscalls, "link", replace)
    with pytest.raises(UnusableError, match="put-if-absent"):
        PosixStore(str(tmp_path)).probe()
    assert list(tmp_path.iterdir()) == []


CREATOR = """
    import sys
    from ckptgate.errors import ExistsError
    from ckptgate_adapters.posix_store import PosixStore
    root, me, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = PosixStore(root)
    print("ready", flush=True)
    sys.stdin.readline()
    for at in range(rounds):
        try:
            store.create(f"log/{at}", f"{me}\\n".encode())
        except ExistsError:
            continue
        print(at, flush=True)
"""

PUBLISHER = """
    import sys
    from ckptgate.model.documents import Manifest, decode
    from ckptgate_adapters.posix_store import PosixStore
    root, run, manifest = sys.argv[1:]
    data = open(manifest, "rb").read()
    store = PosixStore(root)
    print("ready", flush=True)
    sys.stdin.readline()
    store.publish(run, decode(data, Manifest, subject=manifest), data)
"""


def run_together(script: str, arguments: list[list[str]]) -> list[list[str]]:
    """Start one process for each list of arguments, let all go at once; their printed lines."""
    program = textwrap.dedent(script)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for args in arguments
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return printed


def test_of_eight_creating_processes_exactly_one_wins_each_key(tmp_path: Path) -> None:
    """I2, I3, I7."""
    rounds = 40
    printed = run_together(CREATOR, [[str(tmp_path), str(me), str(rounds)] for me in range(8)])
    assert Counter(int(at) for won in printed for at in won) == Counter(range(rounds))
    store = PosixStore(str(tmp_path))
    for me, won in enumerate(printed):
        assert all(store.get(f"log/{at}") == b"%d\n" % me for at in won)
    assert temps(tmp_path) == []


def test_two_publishing_processes_leave_one_whole_tree(
    tmp_path: Path, wanted: dict[str, tuple[object, ...]]
) -> None:
    """I8, I10: any survivor finishes, whoever else is at it."""
    for at in range(5):
        root = tmp_path / f"store-{at}"
        root.mkdir()
        store = PosixStore(str(root))
        occupy(store, root, tmp_path / f"old-{at}", "older")
        manifest, data = rich_checkpoint(store, tmp_path / f"spool-{at}")
        file = tmp_path / f"manifest-{at}"
        file.write_bytes(data)
        run_together(PUBLISHER, [[str(root), RUN, str(file)]] * 2)
        assert snapshot(root / RUN / "step-1") == wanted
        assert os.listdir(root / RUN / ".ckptgate/attempts/step-1.1") == ["data"]
        check_kept(root, "older")
        assert store.published_attempt(RUN, manifest.name) == manifest.attempt
