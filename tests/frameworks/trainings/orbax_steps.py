"""Orbax's CheckpointManager with two JAX processes: by rename, or behind a commit file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.path import atomicity
from tests.frameworks.job import Job
from tests.frameworks.trainings.rules import OrbaxRules

__all__ = ["Orbax"]


class Orbax(OrbaxRules):
    """A way to finish a step's directory."""

    def _manager(self, root: Path) -> Any:
        kind = atomicity.CommitFileTemporaryPath if self.is_file else None
        options = ocp.CheckpointManagerOptions(step_prefix="step", temporary_path_class=kind)
        return ocp.CheckpointManager(root, options=options)

    def train(self, job: Job) -> object:
        jax.distributed.initialize(
            f"127.0.0.1:{os.environ['MASTER_PORT']}",
            job.world,
            job.rank,
            heartbeat_timeout_seconds=30,
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        begin = np.arange(64, dtype=np.float32).reshape(8, 8)

        def spread(value: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(value.shape, split, lambda at: value[at])

        state = {"weights": spread(begin), "moments": spread(begin * 0)}
        manager = self._manager(job.root)
        done = manager.latest_step() or 0
        job.began(f"step_{done}" if done else "")
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        for step in range(done + 1, job.steps + 1):
            moments = jax.tree.map(lambda m, step=step: m * 0.9 + step * 0.01, state["moments"])
            state = {"weights": state["weights"] * 0.99 + moments, "moments": moments}
            if job.is_due(step):
                # The one before is written in the background.
                manager.wait_until_finished()
                job.saving(step)
                manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        manager.close()
        return {key: np.asarray(held.addressable_shards[0].data) for key, held in state.items()}

    def load(self, path: Path) -> object:
        with self._manager(path.parent) as manager:
            number = int(path.name.rpartition("_")[2])
            one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            shape = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=one)
            like = {"weights": shape, "moments": shape}
            return manager.restore(number, args=ocp.args.StandardRestore(like))
