"""A store in a bucket of an S3 service.

Protocol adapter only: it translates calls, bytes and errors. `session` is the connection,
`failures` and `retry` say what an error means and when a request is made again; the parts of
`ports.store.Store` are built on these.
"""

from __future__ import annotations
