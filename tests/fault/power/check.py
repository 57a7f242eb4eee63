"""In the guest, after the power came back: is everything there that was promised before?

`check.py MOUNT STORE SPOOL ACKNOWLEDGED`. Prints one line for each promise that was broken and ends
with 1 then. Looks at the spool's rows, at the mount and at the store.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import sys
import time

from ckptgate.engine.digest import Fingerprint
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import AttemptRow, LocalBytes
from ckptgate_adapters.sqlite_spool import SqliteSpool

DECIDED_S = 60.0
UNDECIDED = {AttemptState.OPEN, AttemptState.SEALED}


class Check:
    def __init__(self, mount: str, store: str, spool: str, noted: str) -> None:
        self.mount, self.store = mount, store
        self.spool = SqliteSpool.attach(spool)
        with open(noted, encoding="ascii") as stream:
            self.promises = [line.split() for line in stream if line.endswith("\n")]
        self.broken: list[str] = []

    def fail(self, *words: object) -> None:
        self.broken.append(" ".join(map(str, words)))

    def database(self) -> None:
        connection = sqlite3.connect(self.spool.path + "/spool.db")
        found = connection.execute("PRAGMA integrity_check").fetchall()
        connection.close()
        if found != [("ok",)]:
            self.fail("database", found)

    def rows_agree(self) -> None:
        """A row that says that bytes were digested is right about them."""
        for file in self.spool.files_in((FileState.DIGESTED, FileState.STORED)):
            if file.local is not LocalBytes.FULL or not file.digest:
                continue
            path = self.spool.data_path(file.file)
            try:
                is_same = Fingerprint.of(path).is_of(file)
            except FileNotFoundError:
                continue
            if is_same and digest_of(path) != file.digest:
                self.fail("row", file.file, "has another digest than its bytes")

    def decided(self) -> dict[str, AttemptRow]:
        """What became of each attempt that was asked to be committed."""
        asked = {words[1] for words in self.promises if words[0] in {"asked", "committed"}}
        deadline = time.monotonic() + DECIDED_S
        while True:
            rows = {row.name: row for row in self.spool.attempts() if row.name in asked}
            left = [row.name for row in rows.values() if row.state in UNDECIDED]
            if not left:
                return rows
            if time.monotonic() > deadline:
                self.fail("undecided", left)
                return rows
            time.sleep(0.2)

    def outcomes(self, rows: dict[str, AttemptRow]) -> None:
        committed = {words[1] for words in self.promises if words[0] == "committed"}
        for name in sorted(committed):
            if not os.path.isdir(f"{self.store}/run/{name}"):
                self.fail("committed", name, "is not in the store")
        for name, row in rows.items():
            if row.state in {AttemptState.ABORTED, AttemptState.ABANDONED} and not row.reason:
                self.fail("refused", name, "without a reason")
            print("outcome", name, row.state, row.reason)

    def files(self, rows: dict[str, AttemptRow]) -> None:
        """Bytes that fsync promised: in the store where committed, else kept in the spool."""
        kept: dict[str, str] = {}
        for row in self.spool.attempts():
            for path, _, file in self.spool.files_of_attempt(row.id):
                kept[f"run/{row.name}/{path}"] = self.spool.data_path(file.file)
        for kind, *words in self.promises:
            if kind != "file":
                continue
            path, digest = words
            published = f"{self.store}/{path}"
            places = [p for p in (published, kept.get(path, "")) if p and os.path.exists(p)]
            if not places:
                self.fail("file", path, "is gone")
            for place in places:
                with open(place, "rb") as stream:
                    if hashlib.blake2b(stream.read()).hexdigest() != digest:
                        self.fail("file", path, "has other bytes at", place)

    def plain(self) -> None:
        digests = [words[2] for words in self.promises if words[0] == "plain"]
        if not digests:
            return
        with open(f"{self.mount}/config.json", "rb") as stream:
            data = stream.read()
        words = data.split()
        number = int(words[1]) if len(words) > 1 else -1
        if data != b"step %d\n" % number * 50:
            self.fail("plain", "config.json is torn:", data[:40], len(data))
        promised = [n for n in range(10_000) if _plain_digest(n) in digests]
        if number < max(promised):
            self.fail("plain", "config.json is of", number, "and not of", max(promised))

    def run(self) -> int:
        self.database()
        self.rows_agree()
        rows = self.decided()
        self.outcomes(rows)
        self.files(rows)
        self.plain()
        self.rows_agree()
        self.spool.close()
        for line in self.broken:
            print("BROKEN", line)
        print("promises", len(self.promises), "broken", len(self.broken))
        return 1 if self.broken else 0


def digest_of(path: str) -> str:
    from blake3 import blake3

    with open(path, "rb") as stream:
        return blake3(stream.read()).hexdigest()


def _plain_digest(step: int) -> str:
    return hashlib.blake2b(b"step %d\n" % step * 50).hexdigest()


sys.exit(Check(*sys.argv[1:]).run())
