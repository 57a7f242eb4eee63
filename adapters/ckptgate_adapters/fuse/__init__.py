"""The FUSE driver: protocol adapter only.

It serves a `FileSystem` and knows nothing of checkpoints.
"""

from ckptgate_adapters.fuse.channel import MountOptions, abort, mount, unmount
from ckptgate_adapters.fuse.server import FuseServer
from ckptgate_adapters.fuse.session import FuseSession

__all__ = ["FuseServer", "FuseSession", "MountOptions", "abort", "mount", "unmount"]
