"""`S3Store`: the whole of `ports.store.Store` on a bucket.

Each part of the contract has its own module; this one puts them together on one connection. Any
thread, any number of processes and machines on the same prefix.
"""

from __future__ import annotations

from ckptgate.ports.store import VerifyMode
from ckptgate_adapters.s3_store.data import S3_MODES, S3Data
from ckptgate_adapters.s3_store.location import S3Options, parse_s3_url
from ckptgate_adapters.s3_store.plain import S3Plain
from ckptgate_adapters.s3_store.publication import S3Publication
from ckptgate_adapters.s3_store.reclaim import S3Reclaim
from ckptgate_adapters.s3_store.records import S3Records
from ckptgate_adapters.s3_store.session import Session
from ckptgate_adapters.s3_store.uploads import S3Uploads

__all__ = ["S3Store"]


class S3Store(S3Records, S3Data, S3Publication, S3Plain, S3Reclaim, S3Uploads):
    """A store below *url*.

    Nothing is asked of the service until the first call; `probe` proves that the bucket can be a
    store.

    Args:
        url: `s3://bucket/prefix`.
        options: how the service is spoken to.

    Raises:
        ConfigError: not such a URL.
    """

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        self.session = Session(parse_s3_url(url), options or S3Options())
        S3Records.__init__(self, self.session)
        S3Data.__init__(self, self.session)
        S3Publication.__init__(self, self.session)
        S3Plain.__init__(self, self.session)
        S3Reclaim.__init__(self, self.session)
        S3Uploads.__init__(self, self.session)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return self.session.location.url

    @property
    def default_verify(self) -> VerifyMode:
        """The store's checksum of the whole object; read back where it has none."""
        return VerifyMode.CHECKSUM

    @property
    def verify_modes(self) -> frozenset[VerifyMode]:
        """A size alone would prove nothing of what a network carried."""
        return S3_MODES
