"""The status page: `page.html`, all of it, and the HTTP server that serves it and the metrics."""

from ckptgate_adapters.status_page.server import Answer, Asked, StatusServer

__all__ = ["Answer", "Asked", "StatusServer"]
