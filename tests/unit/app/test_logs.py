"""The daemon's log: its own lines at the level asked for, a client library's requests never."""

from __future__ import annotations

import logging
import subprocess
import sys

CODE = """
import logging
from ckptgate.app.logs import configure_logging
configure_logging("DEBUG", process="test")
logging.getLogger("ckptgate.engine").debug("own line")
for name in ("botocore.auth", "aiobotocore.credentials", "s3fs", "urllib3.connectionpool"):
    logging.getLogger(name).debug("x-amz-security-token: SECRET")
    logging.getLogger(name).info("Found SECRET")
"""


def test_requests_of_client_libraries_with_their_tokens_are_in_no_log():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert "own line" in done.stderr
    assert "SECRET" not in done.stderr + done.stdout
    assert logging.getLogger("botocore").level != logging.DEBUG
