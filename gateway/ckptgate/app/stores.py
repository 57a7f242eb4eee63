"""Which adapter stands behind a store's address: the only place that chooses one.

An adapter is imported when a store of its kind is opened: most commands open none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

from ckptgate.app.addresses import is_url
from ckptgate.app.config import Config
from ckptgate.app.sections import S3Section
from ckptgate.ports.export import ExportTarget
from ckptgate.ports.store import Store, VerifyMode, check_verify_mode

if TYPE_CHECKING:
    from ckptgate_adapters.s3_store import S3Options

__all__ = ["open_store", "opened_store", "opened_target", "probe_store"]


def open_store(address: str, s3: S3Section) -> Store:
    """The store at an address; nothing is asked of it yet.

    Raises:
        ConfigError: an option of *s3* is not what it should be.
    """
    if not is_url(address):
        from ckptgate_adapters.posix_store import PosixStore  # noqa: PLC0415 - see above

        return PosixStore(address)
    from ckptgate_adapters.s3_store import S3Store  # noqa: PLC0415 - s3fs takes its time

    return S3Store(address, _options(s3))


def _options(s3: S3Section) -> S3Options:
    from ckptgate_adapters.s3_store import S3Options  # noqa: PLC0415 - s3fs takes its time

    return S3Options(
        endpoint_url=s3.endpoint_url,
        profile=s3.profile,
        region=s3.region,
        path_style=s3.path_style,
        anon=s3.anonymous,
        ca_bundle=s3.ca_bundle,
        single_writer=s3.single_writer,
        plain_copy=s3.plain_copy,
        part_bytes=s3.part_bytes,
        parts_in_flight=s3.parts_in_flight,
        max_parallel=s3.parallel,
        stall_s=s3.stall_s,
        tries_max=s3.tries_max,
    )


@contextlib.contextmanager
def opened_store(address: str, s3: S3Section) -> Generator[Store]:
    """The same, closed in the end."""
    store = open_store(address, s3)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def opened_target(address: str, s3: S3Section) -> Generator[ExportTarget]:
    """A place in a bucket that a checkpoint can be exported to, closed in the end.

    Raises:
        UsageError, ConfigError: it can't be one, or an option is wrong.
    """
    from ckptgate_adapters.s3_store.exporting import (  # noqa: PLC0415 - s3fs takes its time
        S3ExportTarget,
    )

    target = S3ExportTarget(address, _options(s3))
    try:
        yield target
    finally:
        target.close()


def probe_store(config: Config) -> None:
    """Prove that a mount's store can be what it is configured to be.

    Raises:
        UsageError: it can't be verified in the configured way.
        UnusableError, FormatVersionError: as `Store.probe`.
    """
    with opened_store(config.store, config.s3) as store:
        if config.verify:
            check_verify_mode(VerifyMode(config.verify), store.verify_modes, store.url)
        store.probe()
