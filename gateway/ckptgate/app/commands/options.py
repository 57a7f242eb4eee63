"""Options that commands share: how an S3 store is reached.

Nothing here is secret: credentials are never arguments, as everybody can read a process's.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ckptgate.app.config import ConfigFile, load_config_file, s3_options
from ckptgate.app.sections import S3Section

__all__ = ["add_s3_options", "add_store_options", "s3_of", "store_options"]


def add_s3_options(parser: Any) -> None:
    """Where the S3 service is, and as whom it is asked."""
    parser.add_argument("--endpoint-url", default="", metavar="URL", help="of an S3 service")
    parser.add_argument("--profile", default="", metavar="NAME", help="of the AWS configuration")
    parser.add_argument("--region", default="", metavar="NAME", help="of the bucket")


def add_store_options(parser: Any) -> None:
    """The same for a command that may be given a store that isn't mounted."""
    add_s3_options(parser)
    parser.add_argument("--config", default="", metavar="FILE", help="TOML, for its [s3]")


def s3_of(args: argparse.Namespace, file: ConfigFile) -> S3Section:
    """How a store is reached by the arguments, the file and the environment.

    Raises:
        UsageError: an argument is wrong.
    """
    return s3_options(
        file.s3,
        os.environ,
        endpoint_url=args.endpoint_url,
        profile=args.profile,
        region=args.region,
    )


def store_options(args: argparse.Namespace) -> S3Section:
    """`s3_of` the arguments that `add_store_options` added.

    Raises:
        UsageError, ConfigError: an argument or the file is wrong.
    """
    return s3_of(args, load_config_file(args.config) if args.config else ConfigFile())
