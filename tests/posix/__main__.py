"""Runs the cases in a directory: `python -m tests.posix DIRECTORY RESULT [CASE...]`."""

from __future__ import annotations

from tests.posix import (  # noqa: F401 - they fill the list
    cases_attr,
    cases_data,
    cases_files,
    cases_list,
    cases_locks,
    cases_map,
    cases_names,
    cases_open,
    cases_rename,
    cases_rights,
    cases_xattr,
)
from tests.posix.suite import main

if __name__ == "__main__":
    main()
