"""Nodes and names against a model made of dictionaries."""

from __future__ import annotations

import os
import shutil

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.sqlite_spool.kit import make, node

from ckptgate.errors import (
    ExistsError,
)
from ckptgate.ports.spool import (
    ROOT_INO,
    NodeKind,
)
from ckptgate_adapters.sqlite_spool import SqliteSpool

NAMES = st.sampled_from(["a", "b", "ü", "step-1"])


class NodesAgainstDicts(RuleBasedStateMachine):
    """Nodes and names behave as two dicts do, across roll-backs, threads' connections, restarts."""

    def __init__(self):
        super().__init__()
        self.path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"spool-model-{os.getpid()}")
        shutil.rmtree(self.path, ignore_errors=True)
        self.spool = make(self.path)
        self.nodes = {ROOT_INO: self.spool.node(ROOT_INO)}
        self.names: dict[tuple[int, str], int] = {}
        self.gone: set[int] = set()
        self.rolled_back: set[int] = set()

    def teardown(self):
        self.spool.close()
        shutil.rmtree(self.path)

    def some(self, at: int) -> int:
        known = sorted(self.nodes)
        return known[at % len(known)]

    @rule(
        kind=st.sampled_from(list(NodeKind)), size=st.integers(0, 2**62), mode=st.integers(0, 0o777)
    )
    def add(self, kind, size, mode):
        row = self.spool.add_node(node(kind, size=size, mode=mode))
        assert row.ino not in self.nodes
        assert row.ino not in self.gone | self.rolled_back
        self.nodes[row.ino] = row

    @rule(parent=st.integers(0, 99), name=NAMES, ino=st.integers(0, 99))
    def link(self, parent, name, ino):
        parent, ino = self.some(parent), self.some(ino)
        if (parent, name) in self.names or ino in self.names.values():
            with pytest.raises(ExistsError):
                self.spool.link(parent, name, ino)
        else:
            self.spool.link(parent, name, ino)
            self.names[parent, name] = ino

    @rule(parent=st.integers(0, 99), name=NAMES)
    def unlink(self, parent, name):
        self.spool.unlink(self.some(parent), name)
        self.names.pop((self.some(parent), name), None)

    @rule(ino=st.integers(0, 99), size=st.integers(0, 2**62))
    def update(self, ino, size):
        ino = self.some(ino)
        self.nodes[ino] = changed = self.spool.update_node(ino, size=size)
        assert changed.size == size

    @rule(ino=st.integers(0, 99))
    def drop(self, ino):
        ino = self.some(ino)
        if ino != ROOT_INO and ino not in self.names.values():
            self.spool.drop_node(ino)
            del self.nodes[ino]
            self.gone.add(ino)
            self.names = {at: of for at, of in self.names.items() if at[0] != ino}
            for name in ("a", "b", "ü", "step-1"):
                self.spool.unlink(ino, name)

    @rule(name=NAMES, is_inner=st.booleans())
    def roll_back(self, name, is_inner):
        with pytest.raises(ZeroDivisionError), self.spool.transaction():
            row = self.spool.add_node(node())
            self.rolled_back.add(row.ino)
            self.spool.unlink(ROOT_INO, name)
            if is_inner:
                with self.spool.transaction():
                    self.spool.link(ROOT_INO, name, row.ino)
            raise ZeroDivisionError

    @rule(is_clean=st.booleans())
    def restart(self, is_clean):
        old = self.spool
        self.rolled_back.clear()
        if is_clean:
            old.close()
        self.spool = SqliteSpool.attach(self.path)
        old.close()

    @invariant()
    def equal(self):
        for ino, row in self.nodes.items():
            assert self.spool.node(ino) == row
            at = [place for place, of in self.names.items() if of == ino]
            assert self.spool.place(ino) == (at[0] if at else None)
            children = [(n, self.nodes[of]) for (p, n), of in self.names.items() if p == ino]
            assert self.spool.children(ino) == children
            directories = sum(row is not None and row.kind is NodeKind.DIR for _, row in children)
            assert self.spool.count_children(ino, most=1000) == (len(children), directories)
            assert self.spool.count_children(ino)[0] == min(len(children), 1)
        for (parent, name), ino in self.names.items():
            assert self.spool.child(parent, name) == self.nodes[ino]
        nameless = set(self.nodes) - set(self.names.values()) - {ROOT_INO}
        assert {row.ino for row in self.spool.nameless_nodes()} == nameless


NodesAgainstDicts.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestNodesAgainstDicts = NodesAgainstDicts.TestCase
