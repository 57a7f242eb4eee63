"""A two-node save on S3 with faults in between, and what must hold in the bucket at any moment.

The bucket is looked at with boto3 alone. The checker folds the log by rules of its own, compares
every object's BLAKE3, and remembers what it has seen and what the nodes were told: I1 to I9, I11.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine_harness import Cluster, StagedNode, outcome
from tests.s3.chaos import ChaosProxy
from tests.s3.matrix import options
from tests.s3.servers import Bucket
from tests.s3.wire import Kind
from tests.sim.checker import Checker
from tests.sim.saves import Save

from ckptgate.model.states import UNDECIDED
from ckptgate_adapters.s3_store import S3Store

__all__ = ["Lab", "Saving"]

BIG = bytes(range(256)) * 4096 * 10 + b"the end"
"""Ten MiB and seven bytes: three parts of five MiB at most."""
SMALL = b"0" * 4096
FILES: dict[tuple[int, str], bytes] = {
    (0, "shard-0.bin"): SMALL,
    (0, "sub/state-0.json"): b'{"rank": 0}',
    (1, "shard-1.bin"): b"1" * 4096,
    (1, "sub/state-1.json"): b'{"rank": 1}',
    (1, "empty"): b"",
}


class Audit:
    """One run in the bucket, as boto3 sees it."""

    def __init__(self, bucket: Bucket, run: str, files: dict[tuple[int, str], bytes]) -> None:
        self._bucket = bucket
        self._run = run
        self._read: dict[tuple[str, str, object], bytes] = {}
        self._checker = Checker(SimpleNamespace(_nodes={}), run, self._fail)  # type: ignore[arg-type]
        save = Save("save-1", "job-1", "step-1", "plain", 2)
        for (rank, path), data in files.items():
            self._checker.wrote(save, rank, path, data)
        for rank in (0, 1):
            self._checker.done(save, rank)

    def look(self, nodes: tuple[StagedNode, ...]) -> None:
        """All that must hold now; what the listing says to be as it was isn't read again."""
        checker = self._checker
        checker._nodes = {
            key: SimpleNamespace(data=data, target="")  # type: ignore[misc]
            for key, data in self._objects()
        }
        checker.after("look", ())
        checker._check_shown("step-1")
        for node in nodes:
            for row in node.raw.attempts(run=self._run):
                if row.attempt and row.state not in UNDECIDED:
                    checker.tell(node.member, row.attempt, str(row.state))

    def settled(self) -> None:
        """All is decided, shown and pointed at as the log says (I12); every byte is read again."""
        self._read.clear()
        self.look(())
        self._checker.settled()
        assert self._checker.current.keys() == {"step-1"}

    def _objects(self) -> Iterator[tuple[str, bytes]]:
        for found in self._bucket.objects(f"{self._run}/"):
            key, version = found["Key"], (found["Key"], found["ETag"], found["LastModified"])
            if version not in self._read:
                self._read[version] = self._bucket.read(key)
            yield key, self._read[version]

    @staticmethod
    def _fail(text: str) -> None:
        raise AssertionError(text)


@dataclass
class Lab:
    """A bucket, a proxy before it, and a store on either side.

    Attributes:
        has_parts: one of the files is large enough for a multipart upload.
        counts: requests of each kind in a save without a fault.
        reference: what everybody sees after it.
    """

    bucket: Bucket
    proxy: ChaosProxy
    tmp: Path
    healthy: S3Store
    faulty: S3Store
    has_parts: bool
    counts: dict[Kind, int] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @staticmethod
    def make(
        bucket: Bucket, proxy: ChaosProxy, tmp: Path, *, has_parts: bool, stall_s: float = 2.0
    ) -> Lab:
        """Needs the bucket's credentials in the environment.

        Where nothing stalls, *stall_s* may be as long as a busy machine needs for a part.
        """
        healthy = S3Store(bucket.url, options(bucket.server.endpoint, stall_s=20))
        faulty = S3Store(bucket.url, options(proxy.endpoint, stall_s=stall_s))
        return Lab(bucket, proxy, tmp, healthy, faulty, has_parts)

    def saving(self) -> Saving:
        """A new run."""
        number = next(self._numbers)
        base = self.tmp / f"{self.bucket.name}-{number}"
        base.mkdir()
        files = {**FILES, (0, "shard-0.bin"): BIG} if self.has_parts else FILES
        return Saving(self, f"run-{number}", base, files)

    def measure(self) -> None:
        """A save without a fault: what it asks for, and what comes of it."""
        self.proxy.clear()
        saving = self.saving()
        saving.go()
        self.counts = {kind: self.proxy.count(kind) for kind in Kind}
        self.reference = saving.finish()
        assert set(self.reference["committed"]) == {"step-1"}
        assert self.reference["pointers"] == {"latest": ("step-1", "step-1\n")}

    def close(self) -> None:
        self.healthy.close()
        self.faulty.close()


class Saving:
    """Two ranks save step-1, each on its node, and rank 0 points `latest` at it."""

    def __init__(self, lab: Lab, run: str, base: Path, files: dict[tuple[int, str], bytes]) -> None:
        self._lab = lab
        self.run = run
        self._files = files
        self.cluster = Cluster(base, store=lab.healthy)
        self._audit = Audit(lab.bucket, run, files)

    def go(self, rounds: int = 100) -> None:
        """Stage all of it, and let both nodes work until nothing moves, through the proxy."""
        nodes = [self.cluster.node(host, store=self._lab.faulty) for host in ("a", "b")]
        for rank, node in enumerate(nodes):
            row = node.begin("step-1", run=self.run)
            for (owner, path), data in self._files.items():
                if owner == rank:
                    node.write(row, path, data, rank=rank)
            node.commit(row, rank, 2)
        nodes[0].point("latest", "step-1", content="step-1\n", run=self.run)
        self.cluster.settle(rounds=rounds)
        self.look()

    def look(self) -> None:
        """What must hold at any moment (I1 to I9)."""
        self._audit.look(tuple(self.cluster.nodes.values()))

    def finish(self) -> dict[str, Any]:
        """Without faults, late requests landed, both processes anew: what everybody sees (I10)."""
        self._lab.proxy.clear()
        self._lab.proxy.land()
        self.look()
        for host in ("a", "b"):
            self.cluster.node(host)
        self.cluster.settle(rounds=150)
        self.cluster.check_invariants(self.run)
        self.look()
        self._audit.settled()
        waiting = [r for n in self.cluster.nodes.values() for r in n.raw.attempts(states=UNDECIDED)]
        assert not waiting, [(row.state, row.missing, row.reason) for row in waiting]
        found = outcome(self.cluster, self.run)
        self.cluster.close()
        return found
