"""These tests sync thousands of files, and none is about a disk: they have theirs in memory."""

from __future__ import annotations

from tests.in_memory import disk_path, tmp_path, tmp_path_factory

__all__ = ["disk_path", "tmp_path", "tmp_path_factory"]
