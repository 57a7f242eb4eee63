"""The directory that a daemon is started in says nothing of what it runs."""

from __future__ import annotations

import subprocess
import sys


def test_a_daemon_runs_no_code_of_the_directory_that_it_is_started_in(tmp_path):
    """I13: anybody may put modules into a directory such as /tmp."""
    hostile, marker, store = (tmp_path / name for name in ("hostile", "marker", "store"))
    hostile.mkdir()
    store.mkdir()
    for name in ("json", "signal", "queue", "ckptgate"):
        (hostile / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})\n")
    command = [sys.executable, "-P", "-m", "ckptgate.app.cli", "serve", "--idle-exit", "1"]
    command += ["--store", str(store), "--spool", str(tmp_path / "spool")]
    done = subprocess.run(
        command, cwd=hostile, capture_output=True, text=True, timeout=90, check=False
    )
    assert not marker.exists(), marker.read_text()
    assert done.returncode == 0, done.stderr
