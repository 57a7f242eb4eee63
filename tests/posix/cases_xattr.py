"""Extended attributes: users' own, the system's, their limits."""

from __future__ import annotations

import errno
import os

from tests.posix.suite import Observation, case, err, opened, put


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listxattr(path))
    except OSError as exc:
        return [errno.errorcode[exc.errno or 0]]


def _value(path: str, name: str) -> str:
    try:
        return os.getxattr(path, name).decode("latin-1")
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]


@case
def extended_attributes() -> Observation:
    found: Observation = {}
    put("f")
    os.mkdir("d")
    for path in ("f", "d"):
        found[f"{path} none"] = [_value(path, "user.a"), _names(path)]
        found[f"{path} set"] = err(os.setxattr, path, "user.a", b"one")
        found[f"{path} set binary"] = err(os.setxattr, path, "user.b", bytes(range(256)))
        found[f"{path} set empty"] = err(os.setxattr, path, "user.c", b"")
        found[f"{path} get"] = [_value(path, f"user.{name}") for name in "abc"]
        found[f"{path} list"] = _names(path)
        found[f"{path} create again"] = err(os.setxattr, path, "user.a", b"2", os.XATTR_CREATE)
        found[f"{path} replace"] = err(os.setxattr, path, "user.a", b"2", os.XATTR_REPLACE)
        found[f"{path} replace none"] = err(os.setxattr, path, "user.z", b"2", os.XATTR_REPLACE)
        found[f"{path} remove"] = [err(os.removexattr, path, "user.a"), _value(path, "user.a")]
        found[f"{path} remove again"] = err(os.removexattr, path, "user.a")
        found[f"{path} left"] = _names(path)
    os.rename("f", "g")
    found["after a rename"] = _names("g")
    with opened("g", os.O_RDWR) as fd:
        found["by descriptor"] = err(os.setxattr, fd, "user.fd", b"1")
        found["read by descriptor"] = os.getxattr(fd, "user.fd").decode()
        os.unlink("g")
        found["of a removed file"] = err(os.getxattr, fd, "user.fd")
    put("g")
    found["a new file has none"] = _names("g")
    return found


@case
def limits_of_extended_attributes() -> Observation:
    put("f")
    return {
        "name of 255": err(os.setxattr, "f", "user." + "n" * 250, b"1"),
        "name of 256": err(os.setxattr, "f", "user." + "n" * 251, b"1"),
        "no prefix": err(os.setxattr, "f", "plain", b"1"),
        "unknown prefix": err(os.setxattr, "f", "other.x", b"1"),
        "empty name": err(os.setxattr, "f", "user.", b"1"),
        "2000 bytes": err(os.setxattr, "f", "user.big", b"x" * 2000),
        "65537 bytes": err(os.setxattr, "f", "user.huge", b"x" * 65537),
        "of a missing file": err(os.getxattr, "none", "user.a"),
        "bad flags": err(os.setxattr, "f", "user.q", b"1", 99),
    }


@case
def extended_attributes_of_links() -> Observation:
    os.symlink("x", "s")
    return {
        "set": err(os.setxattr, "s", "user.a", b"1", follow_symlinks=False),
        "get": err(os.getxattr, "s", "user.a", follow_symlinks=False),
        "list": sorted(os.listxattr("s", follow_symlinks=False)),
    }


@case
def large_extended_attributes() -> Observation:
    put("f")
    return {"5000 bytes": err(os.setxattr, "f", "user.large", b"x" * 5000)}


@case
def extended_attributes_of_the_system() -> Observation:
    put("f")
    return {
        "capability": err(os.getxattr, "f", "security.capability"),
        "trusted": err(os.setxattr, "f", "trusted.x", b"1"),
        "security": err(os.setxattr, "f", "security.x", b"1"),
        "acl": err(os.getxattr, "f", "system.posix_acl_access"),
    }
