"""A store in a bucket of an S3 service.

Protocol adapter only: it translates calls, bytes and errors. `session` is the connection,
`failures` and `retry` say what an error means and when a request is made again; the parts of
`ports.store.Store` are built on these.
"""

from ckptgate_adapters.s3_store.location import S3Location, S3Options, parse_s3_url
from ckptgate_adapters.s3_store.store import S3Store

__all__ = ["S3Location", "S3Options", "S3Store", "parse_s3_url"]
