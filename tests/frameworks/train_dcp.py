"""An unmodified trainer: FSDP2 on CPU with gloo, saved by torch.distributed.checkpoint.

Run by torchrun. Each rank may see the run's directory under its own path (the nodes' mounts). It
resumes from the newest `step-N` that has a `.metadata`, as trainers do, and writes the digest of
its final state. It knows nothing of ckptgate.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def newest(run: Path) -> int:
    """The newest complete step, 0 if there is none."""
    steps = [
        int(found[1])
        for name in os.listdir(run)
        if (found := re.fullmatch(r"step-(\d+)", name)) and (run / name / ".metadata").is_file()
    ]
    return max(steps, default=0)


def full_digest(model: nn.Module, optim: torch.optim.Optimizer) -> str:
    """Digest of this rank's model and optimizer shards."""
    digest = hashlib.sha256()
    model_state, optim_state = get_state_dict(model, optim)
    for _, value in sorted(model_state.items()):
        digest.update(value.to_local().detach().contiguous().numpy().tobytes())
    for _, state in sorted(optim_state["state"].items()):
        for _, value in sorted(state.items()):
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(local.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", help="the run's directory, one path for each node")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--mode", choices=["save", "async"], default="save")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-step", type=int, default=-1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each save")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds for each item of a shard")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    run = Path(args.runs[rank * len(args.runs) // world])
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 64))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = torch.tensor([newest(run)])
    dist.broadcast(start, 0)
    done = int(start.item())
    if done:
        model_state, optim_state = get_state_dict(model, optim)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=run / f"step-{done}")
        set_state_dict(
            model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
    print(f"rank {rank} starts after step {done}", flush=True)
    # Each rank's shard says which start of the job wrote it.
    job = list(os.environ["TORCHELASTIC_RUN_ID"].encode())
    stamp = {f"rank{rank}": torch.tensor(job, dtype=torch.uint8)}
    if args.slow:
        slow_down(args.slow)
    # A background save must not share its collectives' group with the training step.
    saving = dist.new_group(backend="gloo")
    pending = None
    for step in range(done + 1, args.steps + 1):
        torch.manual_seed(1000 * step + rank)
        data = torch.randn(16, 64)
        optim.zero_grad()
        (model(data) - data).pow(2).mean().backward()
        optim.step()
        if step % args.every:
            continue
        if pending is not None:
            pending.result()
        model_state, optim_state = get_state_dict(model, optim)
        state = {"model": model_state, "optim": optim_state, "job": stamp}
        if step == args.kill_step and rank == args.kill_rank:
            kill_in_save()
        target = run / f"step-{step}"
        (args.out / f"saving-{step}-{rank}").touch()
        if args.mode == "async":
            pending = dcp.async_save(state, checkpoint_id=target, process_group=saving)
        else:
            dcp.save(state, checkpoint_id=target)
        (args.out / f"saved-{step}-{rank}").touch()
        time.sleep(args.pause)
    if pending is not None:
        pending.result()
    (args.out / f"final-{rank}").write_text(full_digest(model, optim))
    dist.barrier()
    dist.destroy_process_group()


def slow_down(item_s: float) -> None:
    """Write each item of a shard as late as a big one would be."""
    from torch.distributed.checkpoint import filesystem

    real = filesystem._write_item

    def write(*words, **more):
        result = real(*words, **more)
        time.sleep(item_s)
        return result

    filesystem._write_item = write


def kill_in_save() -> None:
    """Die by SIGKILL in the middle of this rank's shard."""
    from torch.distributed.checkpoint import filesystem

    real = filesystem._write_item

    def write(transforms, stream, *rest, **more):
        stream.write(b"torn")
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return real(transforms, stream, *rest, **more)

    filesystem._write_item = write


if __name__ == "__main__":
    main()
