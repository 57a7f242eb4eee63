"""What differs from ext4, and why: the one list that the suite and SEMANTICS.md are held to.

A difference names what it is about as `case:observation` (`*` for all observations of a case) and
where it is seen: everywhere, only in open checkpoints, only in plain directories, or only with or
without kernel passthrough.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

__all__ = ["DIFFERENCES", "Difference", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference.

    Attributes:
        call: what is called.
        local: what ext4 does.
        here: what the mount does.
        why: the reason.
        seen: patterns of `case:observation`.
        places: of `passthrough-plain`, `loop-checkpoint` and so on, those that differ.
    """

    call: str
    local: str
    here: str
    why: str
    seen: tuple[str, ...]
    places: str = "*"

    def covers(self, place: str, observation: str) -> bool:
        """Whether it explains this observation there."""
        return fnmatch.fnmatchcase(place, self.places) and any(
            fnmatch.fnmatchcase(observation, pattern) for pattern in self.seen
        )


DIFFERENCES = (
    Difference(
        call="`link`",
        local="a second name",
        here="EPERM",
        why="two names of one file could not be committed apart; `git clone` and "
        "`rsync --link-dest` copy then, `cp -l` and an explicit `git clone --local` refuse",
        seen=("hard_links:*",),
    ),
    Difference(
        call="`mkfifo`, `mknod` of sockets and devices",
        local="are made",
        here="EPERM",
        why="they could not be part of a checkpoint",
        seen=("special_files:*",),
    ),
    Difference(
        call="`open(O_TMPFILE)`",
        local="a file without a name",
        here="EOPNOTSUPP",
        why="programs fall back to a name that they remove (Python's and C's `tmpfile` do)",
        seen=("unnamed_temporary_files:*WR*", "unnamed_temporary_files_get_a_name:*"),
    ),
    Difference(
        call="names that aren't UTF-8",
        local="any bytes",
        here="EILSEQ",
        why="manifests and keys of object stores are text",
        seen=("names_that_are_no_text:create not UTF-8",),
    ),
    Difference(
        call="names with control characters",
        local="allowed",
        here="EINVAL to make",
        why="listings and logs of object stores can't hold them",
        seen=(
            "names_that_are_no_text:create newline",
            "names_that_are_no_text:create control",
            "names_that_are_no_text:create delete",
        ),
    ),
    Difference(
        call="`mkdir` below a path of 4096 bytes",
        local="any depth, step by step",
        here="ENAMETOOLONG",
        why="the path is a key in the store, and no program could open it by its whole path",
        seen=("paths_over_the_limit:last",),
    ),
    Difference(
        call="`symlink` to an absolute path, or out of the checkpoint",
        local="allowed",
        here="EPERM in a checkpoint, allowed outside",
        why="the store could not keep it true",
        seen=("symlinks_that_lead_out:*",),
        places="*-checkpoint",
    ),
    Difference(
        call="`renameat2(RENAME_EXCHANGE)` with a directory",
        local="one step",
        here="EINVAL in plain directories, one step in a checkpoint",
        why="the store has no such step, and other nodes would see half of it",
        seen=("rename_that_exchanges_directories:*",),
        places="*-plain",
    ),
    Difference(
        call="`renameat2(RENAME_WHITEOUT)`",
        local="leaves a whiteout",
        here="EINVAL",
        why="it is a device file (only overlayfs wants it)",
        seen=("rename_with_whiteout:*",),
    ),
    Difference(
        call="`fallocate(COLLAPSE_RANGE)`, `(INSERT_RANGE)`",
        local="moves the bytes behind",
        here="EOPNOTSUPP",
        why="the kernel's FUSE knows no such request",
        seen=("allocation_modes:collapse*", "allocation_modes:insert*"),
    ),
    Difference(
        call="`write` with O_DIRECT at odd offsets, lengths or addresses",
        local="EINVAL",
        here="done",
        why="refusing at a write what the open allowed loses data",
        seen=("direct_input_and_output:unaligned*",),
    ),
    Difference(
        call="`preadv2(RWF_NOWAIT)`",
        local="what is cached",
        here="EOPNOTSUPP",
        why="the kernel's FUSE doesn't offer it; programs read without it then",
        seen=("reads_that_must_not_wait:cached",),
    ),
    Difference(
        call="`st_atime`",
        local="moves with reads (relatime) and `utimens`",
        here="is the mtime",
        why="a read would be a change of the spool's database",
        seen=(
            "a_read_moves_the_access_time:moved",
            "access_times_of_directories_and_links:*",
            "times_that_are_left_or_now:atime*",
        ),
    ),
    Difference(
        call="`statx` with STATX_BTIME",
        local="the birth time",
        here="not given",
        why="it isn't kept",
        seen=("birth_times:given",),
    ),
    Difference(
        call="`setxattr` of `trusted.*`, `security.*`; ACLs",
        local="are kept",
        here="ENOTSUP (`getxattr` too)",
        why="the store's files belong to the publisher: rights beyond the mode could not be kept",
        seen=(
            "extended_attributes_of_the_system:acl",
            "extended_attributes_of_the_system:security",
            "extended_attributes_of_the_system:trusted",
        ),
    ),
    Difference(
        call="`setxattr` of many bytes",
        local="ENOSPC over about 4 KB a file",
        here="ENOSPC over 64 KiB a file",
        why="there is room in the database",
        seen=("large_extended_attributes:5000 bytes",),
    ),
    Difference(
        call="`lsattr`, `chattr` (FS_IOC_GETFLAGS)",
        local="flags of the inode",
        here="ENOTTY",
        why="there are no such flags",
        seen=("flags_of_inodes:GETFLAGS",),
    ),
    Difference(
        call="`write` by another user to a file with setuid or setgid",
        local="takes the bits away",
        here="takes them away without passthrough; with it they stay",
        why="the kernel writes without asking; the mount is `nosuid`: the bits mean nothing here",
        seen=("a_write_takes_set_id_bits:write * by a user",),
        places="passthrough-*",
    ),
)


def table() -> str:
    """The list as SEMANTICS.md has it."""
    lines = ["| call | ext4 | here | why |", "|---|---|---|---|"]
    for item in DIFFERENCES:
        cells = (item.call, item.local, item.here, item.why)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
