"""What must hold after every change of the store, told from its bytes alone.

It folds the log by rules of its own (JSON in, plain dictionaries), knows what the simulated
trainers wrote, and remembers what anybody was told. Nothing of the engine or its model is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import blake3
from tests.sim.saves import Save

from ckptgate_adapters.memory_store import MemoryStore

__all__ = ["Checker"]

_BASE = ".ckptgate"


@dataclass
class _Attempt:
    name: str
    seal: int
    phase: str = "SEALED"
    manifest: dict[str, Any] = field(default_factory=dict)
    is_published: bool = False
    voters: set[str] = field(default_factory=set)
    """Members whose final vote was there when it was closed."""


class Checker:
    """The invariants I1 to I9 of one run, and what was told (I6)."""

    def __init__(self, store: MemoryStore, run: str, fail: Callable[[str], None]) -> None:
        self._nodes = store._nodes
        self._run = run
        self._fail = fail
        self.log: list[bytes] = []
        self.generation = 0
        self.jobs: dict[str, int] = {}
        self.attempts: dict[str, _Attempt] = {}
        self.current: dict[str, str] = {}
        self.retired: set[str] = set()
        self.owned: set[str] = set()
        """Pointers that a framework writes itself."""
        self.newest_seals: dict[str, int] = {}
        self.pointers: dict[str, tuple[str, int]] = {}
        self.told: dict[str, set[tuple[str, str]]] = {}
        self.kept: dict[str, bytes] = {}
        """Key -> bytes of everything that a COMMIT reaches."""
        self.reached: dict[str, dict[str, bytes]] = {}
        """The same by attempt, until a RECLAIM gives it free."""
        self.saves: dict[str, Save] = {}
        self.written: dict[str, tuple[str, int, str]] = {}
        """Digest -> save, rank, path."""
        self.deleted: set[tuple[str, str]] = set()
        """Name and attempt that somebody removed."""
        self.abort_asked: set[str] = set()
        self.entries = 0

    # What trainers did

    def wrote(self, save: Save, rank: int, path: str, data: bytes) -> None:
        """This rank is about to close these bytes."""
        digest = blake3.blake3(data).hexdigest()
        self.saves[save.id] = save
        save.part(rank).versions.setdefault(path, []).append(digest)
        self.written[digest] = (save.id, rank, path)

    @staticmethod
    def done(save: Save, rank: int, *, is_promised: bool = True) -> None:
        """This rank is about to say that its part is written."""
        part = save.part(rank)
        if is_promised:
            part.required = {path: len(found) - 1 for path, found in part.versions.items()}
        part.is_done = True

    # What the store has

    def after(self, call: str, args: tuple[Any, ...]) -> None:
        """The store changed."""
        self._check_kept()
        while (data := self._data(self._slot(len(self.log)))) is not None:
            self._take(data)
        if self._data(self._slot(len(self.log) + 1)) is not None:
            self._fail(f"I7 the log has a hole at slot {len(self.log)}")
        if call == "publish":
            self._check_shown(args[1].name)
        elif call == "set_pointer":
            self._check_pointer(args[1])
        elif call == "unpublish" and self.current.get(args[1]) == args[2]:
            self._fail(f"I9 {args[1]} is hidden, though no RETIRE of {args[2]} is in the log")

    def _slot(self, index: int) -> str:
        return f"{self._run}/{_BASE}/log/{index:010d}.json"

    def _data(self, key: str) -> bytes | None:
        node = self._nodes.get(key)
        return None if node is None else node.data

    def _check_kept(self) -> None:
        nodes = self._nodes
        for key, data in self.kept.items():
            node = nodes.get(key)
            if node is None:
                self._fail(f"I9 {key} is gone, but a COMMIT or the log reaches it")
            elif node.data is not data and node.data != data:
                self._fail(f"I7/I9 the bytes of {key} changed, but a COMMIT or the log reaches it")

    def _check_shown(self, name: str) -> None:
        data = self._data(f"{self._run}/{name}/{_BASE}/manifest.json")
        shown = json.loads(data)["attempt"] if data else ""
        if shown and self._phase(shown) != "COMMITTED":
            self._fail(f"I8 {name} shows {shown}, which is {self._phase(shown)}")

    def _check_pointer(self, value: Any) -> None:
        if not any(view.name == value.target and view.manifest for view in self.attempts.values()):
            self._fail(f"I5 {value.pointer} shows {value.target}, which was never committed")

    def _phase(self, attempt: str) -> str:
        view = self.attempts.get(attempt)
        return "OPEN" if view is None else view.phase

    # The log

    def _take(self, data: bytes) -> None:
        index = len(self.log)
        record = json.loads(data)
        previous = blake3.blake3(self.log[-1]).hexdigest() if self.log else ""
        if record["index"] != index or record["previous"] != previous:
            self._fail(f"I7 record {index} does not follow its predecessor")
        self.log.append(data)
        self.kept[self._slot(index)] = data
        entry = record["entry"]
        getattr(self, f"_take_{entry['type'].lower()}")(entry, index)
        self.entries += 1

    def _take_fence(self, entry: dict[str, Any], index: int) -> None:
        del index
        if entry["generation"] != self.generation + 1 or entry["job_key"] in self.jobs:
            self._fail(f"I4 FENCE of {entry['job_key']} is {entry['generation']}")
        self.generation = entry["generation"]
        self.jobs[entry["job_key"]] = self.generation

    def _take_seal(self, entry: dict[str, Any], index: int) -> None:
        attempt = entry["attempt"]
        if entry["generation"] != self.generation:
            self._fail(f"I4 SEAL of {attempt} with generation {entry['generation']} after a FENCE")
        if attempt in self.attempts:
            self._fail(f"I3 {attempt} is sealed though it is {self._phase(attempt)}")
        intent = self._document(f"{attempt}/intent.json")
        if intent["is_shared"] and self.jobs.get(intent["job_key"]) != self.generation:
            self._fail(f"I4 SEAL of {attempt} for the older job {intent['job_key']}")
        self.attempts[attempt] = _Attempt(entry["name"], index)

    def _take_close(self, entry: dict[str, Any], index: int) -> None:
        del index
        attempt = entry["attempt"]
        self._advance(attempt, {"SEALED"}, "CLOSED")
        self.attempts[attempt].voters = {
            key.split("/")[-2]
            for key in self._nodes
            if key.startswith(self._place(f"{attempt}/votes/")) and self._is_final(key)
        }

    def _take_abort(self, entry: dict[str, Any], index: int) -> None:
        attempt = entry["attempt"]
        if attempt not in self.attempts:
            self.attempts[attempt] = _Attempt(attempt.rpartition(".")[0], index, phase="OPEN")
        self._advance(attempt, {"OPEN", "SEALED", "CLOSED"}, "ABORTED")
        if not entry["reason"]:
            self._fail(f"ABORT of {attempt} gives no reason")

    def _take_published(self, entry: dict[str, Any], index: int) -> None:
        del index
        view = self.attempts[entry["attempt"]]
        if view.phase != "COMMITTED" or view.is_published:
            self._fail(f"PUBLISHED of {entry['attempt']}, which is {view.phase}")
        view.is_published = True

    def _take_point(self, entry: dict[str, Any], index: int) -> None:
        value = entry["pointer"]
        if value["target"] not in self.current:
            self._fail(f"I5 POINT to {value['target']}, which is not committed")
        self.pointers[value["pointer"]] = (value["target"], index)

    def _take_retire(self, entry: dict[str, Any], index: int) -> None:
        del index
        name, attempt = entry["name"], entry["attempt"]
        if self.current.get(name) != attempt:
            self._fail(f"I9 RETIRE of {name} {attempt}, which is {self.current.get(name)}")
        if (name, attempt) not in self.deleted:
            self._fail(f"I9 RETIRE of {attempt}, which nobody removed")
        if any(target == name for target, _ in self.pointers.values()):
            self._fail(f"I9 RETIRE of {name}, which a pointer names")
        seal = self.attempts[attempt].seal
        if not any(self.attempts[other].seal > seal for other in self.current.values()):
            self._fail(f"I9 RETIRE of {name}, the last good checkpoint")
        del self.current[name]
        self.retired.add(attempt)

    def _take_reclaim(self, entry: dict[str, Any], index: int) -> None:
        del index
        for attempt in entry["attempts"]:
            if self._phase(attempt) != "COMMITTED" or attempt in self.current.values():
                self._fail(f"I9 RECLAIM of {attempt}, which is committed or was never")
            self.reached.pop(attempt, None)
        self.kept = {self._slot(at): data for at, data in enumerate(self.log)}
        for found in self.reached.values():
            self.kept.update(found)

    def _take_commit(self, entry: dict[str, Any], index: int) -> None:
        del index
        attempt, name = entry["attempt"], entry["name"]
        self._advance(attempt, {"CLOSED"}, "COMMITTED")
        view = self.attempts[attempt]
        if view.name != name:
            self._fail(f"I2 {attempt} was sealed as {view.name}, is committed as {name}")
        key = f"{attempt}/manifest-{entry['manifest']}.json"
        data = self._data(self._place(key))
        if data is None or blake3.blake3(data).hexdigest() != entry["manifest"]:
            self._fail(f"I1 the manifest of {attempt} is not in the store as COMMIT names it")
        assert data is not None
        view.manifest = json.loads(data)
        self._reach(attempt, self._place(key), data)
        self._check_manifest(attempt, view.manifest)
        if not view.voters <= set(view.manifest["members"]):
            self._fail(f"I6 {attempt} lacks one of {view.voters}, who had voted before its CLOSE")
        if self.newest_seals.get(name, -1) > view.seal:
            self._fail(f"I2 {attempt} is committed after one of {name} whose seal is newer")
        self.newest_seals[name] = view.seal
        self.current.pop(name, None)
        self.current[name] = attempt
        self._move_pointers(name, view.seal, entry.get("pointers", ()))
        for member, state in self.told.get(attempt, set()):
            if state in {"aborted", "abandoned"} and member in view.manifest["members"]:
                self._fail(f"I6 {member} was told that {attempt} is {state}; it is committed")

    def _move_pointers(self, name: str, seal: int, values: Iterable[dict[str, str]]) -> None:
        """I5: only what comes from a newer seal moves a pointer."""
        names = {value["pointer"]: value["target"] for value in values}
        self.owned.update(names)
        if "latest" not in self.owned:
            names["latest"] = name
        for pointer, target in names.items():
            if self.pointers.get(pointer, ("", -1))[1] < seal:
                self.pointers[pointer] = (target, seal)

    def _advance(self, attempt: str, before: set[str], after: str) -> None:
        if self._phase(attempt) not in before:
            self._fail(f"I3/I4 {after} of {attempt}, which is {self._phase(attempt)}")
        self.attempts[attempt].phase = after
        if after == "ABORTED":
            for member, state in self.told.get(attempt, set()):
                if state == "committed":
                    self._fail(f"I6 {member} was told that {attempt} is committed; it is aborted")

    # What a COMMIT says

    def _place(self, key: str) -> str:
        return f"{self._run}/{_BASE}/attempts/{key}"

    def _document(self, key: str) -> dict[str, Any]:
        data = self._data(self._place(key))
        if data is None:
            self._fail(f"{key} is not in the store")
        assert data is not None
        return json.loads(data)

    def _check_manifest(self, attempt: str, manifest: dict[str, Any]) -> None:
        files = [entry for entry in manifest["entries"] if entry["type"] == "file"]
        paths = [entry["path"] for entry in manifest["entries"]]
        if len(paths) != len(set(paths)):
            self._fail(f"I1 {attempt} names a path twice")
        votes = {member: self._final_vote(attempt, member) for member in manifest["members"]}
        said = {
            (entry["path"], entry.get("digest", ""))
            for vote in votes.values()
            for entry in vote["entries"]
        }
        base = self._base_files(manifest)
        for entry in files:
            self._check_bytes(attempt, entry)
            if (entry["path"], entry["digest"]) not in said | set(base.items()):
                self._fail(f"I1 {attempt}: {entry['path']} is in no final vote as committed")
        found = {e["path"]: e["digest"] for e in files}
        self._check_content(attempt, found, base, is_silent=manifest["event"] == "quiescence")

    def _is_final(self, key: str) -> bool:
        data = self._data(key)
        return bool(data) and bool(json.loads(data or b"{}").get("is_final"))

    def _final_vote(self, attempt: str, member: str) -> dict[str, Any]:
        """The newest vote of a member, which must be final."""
        found: dict[str, Any] = {}
        n = 0
        while (data := self._data(self._place(f"{attempt}/votes/{member}/{n}.json"))) is not None:
            found = json.loads(data)
            n += 1
        if not found.get("is_final"):
            self._fail(f"I1 {attempt} is committed without a final vote of {member}")
        return found

    def _base_files(self, manifest: dict[str, Any]) -> dict[str, str]:
        base = manifest.get("base", "")
        if not base:
            return {}
        entries = self.attempts[base].manifest["entries"]
        return {e["path"]: e["digest"] for e in entries if e["type"] == "file"}

    def _check_bytes(self, attempt: str, entry: dict[str, Any]) -> None:
        key = f"{self._run}/{entry['key']}"
        data = self._data(key)
        if data is None:
            self._fail(f"I1 {attempt}: the bytes of {entry['path']} are not in the store")
        assert data is not None
        if len(data) != entry.get("size", 0) or blake3.blake3(data).hexdigest() != entry["digest"]:
            self._fail(f"I1 {attempt}: the store's bytes of {entry['path']} are others")
        self._reach(attempt, key, data)

    def _reach(self, attempt: str, key: str, data: bytes) -> None:
        """A COMMIT names it: from here on it stays."""
        self.kept[key] = data
        self.reached.setdefault(attempt, {})[key] = data

    def _check_content(
        self, attempt: str, files: dict[str, str], base: dict[str, str], *, is_silent: bool
    ) -> None:
        """I1, I8: all of one save, all that its ranks had said to be done, nothing older.

        Files that leave all of a checkpoint's format as it was may be committed without a word.
        """
        saves: set[str] = set()
        for path, digest in files.items():
            if base.get(path) == digest:
                continue
            save, _, wrote = self.written.get(digest, ("", 0, ""))
            if wrote != path:
                self._fail(f"I1 {attempt}: nobody wrote {path} as it is committed")
            saves.add(save)
        if len(saves) > 1:
            self._fail(f"I8 {attempt} mixes the saves {sorted(saves)}")
        of_format = {p for p in base if p.endswith((".metadata", ".distcp"))} or base.keys()
        is_addition = is_silent and bool(base) and all(files.get(p) == base[p] for p in of_format)
        for save in saves:
            if not is_addition:
                self._check_save(attempt, self.saves[save], files)

    def _check_save(self, attempt: str, save: Save, files: dict[str, str]) -> None:
        done = {rank for rank, part in save.parts.items() if part.is_done}
        if set(range(save.world)) - done:
            self._fail(f"I1 {attempt} is committed, but not all ranks of {save.id} were done")
        if save.is_contradicting and len(save.parts) > 1:
            self._fail(f"I1 {attempt} is committed, though its ranks contradict each other")
        for rank, part in save.parts.items():
            if part.attempt not in {"", attempt}:
                continue
            for path, version in part.required.items():
                newer = part.versions[path][version:]
                if files.get(path) not in newer and not self._is_shared(save, path, files):
                    self._fail(f"I1 {attempt} lacks {path} as rank {rank} of {save.id} closed it")

    @staticmethod
    def _is_shared(save: Save, path: str, files: dict[str, str]) -> bool:
        """Whether another rank wrote these bytes under that path last."""
        return any(
            files.get(path) == part.versions.get(path, [""])[-1] for part in save.parts.values()
        )

    # What anybody was told

    def tell(self, member: str, attempt: str, state: str) -> None:
        """The member's spool says so to whoever asks."""
        phase = self._phase(attempt)
        self.told.setdefault(attempt, set()).add((member, state))
        if state == "committed" and phase != "COMMITTED":
            self._fail(f"I6 {member} says that {attempt} is committed; the log says {phase}")
        if state == "aborted" and phase == "COMMITTED":
            if member in self.attempts[attempt].manifest["members"]:
                self._fail(f"I6 {member} says that {attempt} is aborted; its files are committed")
        elif state == "aborted" and phase != "ABORTED":
            self._fail(f"I6 {member} says that {attempt} is aborted; the log says {phase}")
        if state == "abandoned" and phase == "COMMITTED":
            self._fail(f"I6 {member} gives {attempt} up, which is committed")

    def read(self, name: str, files: dict[str, str]) -> None:
        """I8: a reader found these files (path -> digest) in one directory."""
        for attempt, view in self.attempts.items():
            if view.name == name and view.manifest:
                entries = view.manifest["entries"]
                if files == {e["path"]: e["digest"] for e in entries if e["type"] == "file"}:
                    return
                del attempt
        self._fail(f"I8 a reader of {name} saw what was never committed: {sorted(files)}")

    # The end

    def settled(self) -> None:
        """All is decided, shown and pointed at as the log says (I12)."""
        for attempt, view in self.attempts.items():
            if view.phase not in {"COMMITTED", "ABORTED"}:
                self._fail(f"I12 {attempt} stays {view.phase}")
        for name, attempt in self.current.items():
            data = self._data(f"{self._run}/{name}/{_BASE}/manifest.json")
            shown = json.loads(data)["attempt"] if data else ""
            if shown != attempt or not self.attempts[attempt].is_published:
                self._fail(f"I12 {name} shows {shown!r} in the end, not {attempt}")
        for attempt in self.retired:
            name = self.attempts[attempt].name
            if name not in self.current and f"{self._run}/{name}" in self._nodes:
                self._fail(f"I12 {name} is retired and still shown")
        for pointer, (target, _) in self.pointers.items():
            node = self._nodes.get(f"{self._run}/{pointer}")
            said = "" if node is None else node.target or node.data.decode()
            if target in self.current and said.strip().rpartition("/")[2] != target:
                self._fail(f"I5 {pointer} shows {said!r} in the end, not {target}")
