"""One rank of a job that saves by `dcp.save(checkpoint_id="ckpt://...")`: FsspecWriter, unchanged.

Words: URL of the checkpoint, rank, world size, port, then `save`, `load`, `both`, or `die` (in the
midst of the shard, where the rank is 1).
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    url, rank, world, port, what = sys.argv[1:6]
    os.environ |= {
        "RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(world),))
    values = torch.arange(64 * 1024, dtype=torch.float32).reshape(256, 256)
    if what != "load":
        if what == "die" and rank == "1":
            die_in_the_shard()
        state = {"w": distribute_tensor(values, mesh, [Shard(0)])}
        dcp.save(state, checkpoint_id=url)
    if what in {"load", "both"}:
        state = {"w": distribute_tensor(torch.zeros(256, 256), mesh, [Shard(0)])}
        dcp.load(state, checkpoint_id=url)
        assert torch.equal(state["w"].full_tensor(), values)
    print("done", flush=True)
    dist.destroy_process_group()


def die_in_the_shard() -> None:
    """Have this process killed once some of its shard is written."""
    from ckptgate_adapters.fsspec_ckpt.writers import CkptWriter

    real = CkptWriter.write

    def write(self: CkptWriter, data: bytes) -> int:
        done = real(self, data)
        self.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return done

    CkptWriter.write = write  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    main()
