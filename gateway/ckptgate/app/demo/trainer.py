"""One rank of the demo's job: writes its shards as a trainer would, then commits.

`python -m ckptgate.app.demo.trainer CHECKPOINT RANK WORLD_SIZE MIB PAUSE_S`; prints the BLAKE3 of
each shard that it wrote, so that the reader's bytes can be compared.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Final

import blake3

from ckptgate.app.api import commit

__all__ = ["SHARDS", "main", "shard_name"]

SHARDS: Final = 2
_BLOCK_BYTES: Final = 1 << 20


def shard_name(rank: int, shard: int) -> str:
    """Name of a shard file."""
    return f"rank{rank}-shard{shard}.bin"


def _write_shard(path: str, seed: str, mib: int, pause_s: float) -> str:
    """Write *mib* MiB and return their digest."""
    source = random.Random(seed)  # noqa: S311 - test data, the same at each run
    digest = blake3.blake3()
    with open(path, "wb") as stream:
        for _ in range(mib):
            block = source.randbytes(_BLOCK_BYTES)
            stream.write(block)
            digest.update(block)
            time.sleep(pause_s)
    return digest.hexdigest()


def main(argv: list[str]) -> int:
    """Save this rank's part of one checkpoint."""
    checkpoint, rank, world_size, mib, pause_s = argv
    os.makedirs(checkpoint, exist_ok=True)
    for shard in range(SHARDS):
        name = shard_name(int(rank), shard)
        seed = f"{os.path.basename(checkpoint)}/{name}"
        digest = _write_shard(os.path.join(checkpoint, name), seed, int(mib), float(pause_s))
        print(name, digest, flush=True)
    commit(checkpoint, int(rank), int(world_size))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
