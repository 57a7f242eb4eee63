"""`ckpt://` as fsspec finds it: the file system of the adapter, and how its daemon is reached.

Registered by the entry point `fsspec.specs`, so it is imported with the first `ckpt://` only.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

from fsspec import config as fsspec_config

from ckptgate.app.addresses import store_address
from ckptgate.app.config import Config
from ckptgate.app.daemons import Wanted, daemon_config, reach
from ckptgate.errors import UsageError
from ckptgate_adapters.fsspec_ckpt import filesystem

__all__ = ["CkptFileSystem"]


class CkptFileSystem(filesystem.CkptFileSystem):
    """A store by fsspec, with ckptgate's guarantees: see `ckptgate_adapters.fsspec_ckpt`.

    Args:
        store: directory, `file:///` URL or `s3://bucket/prefix`; by default as the configuration
            file says, or the daemon that served *spool* before.
        spool: local directory for staging; by default that of a mount of the store, or one in the
            user's state directory.
        config: path of a ckptgate configuration file (else `CKPTGATE_CONFIG`).
        endpoint_url, profile, region: of a bucket.
        idle_exit_s: a daemon that is started here ends when it wasn't needed for so long.
        fo, target_protocol, target_options: of the chained form `ckpt::s3://bucket/prefix`, which
            goes before the store that fsspec's configuration names.
        options: see `filesystem.CkptFileSystem`.
    """

    def __init__(  # noqa: PLR0913 - options that users name
        self,
        store: str = "",
        spool: str = "",
        config: str = "",
        *,
        endpoint_url: str = "",
        profile: str = "",
        region: str = "",
        idle_exit_s: float = 60.0,
        fo: str = "",
        target_protocol: str = "",
        target_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        chained = dict(target_options or {})
        if target_protocol:
            protocol = "file" if target_protocol == "local" else target_protocol
            store, spool = _chosen(f"{protocol}://{fo}", store, spool)
        in_client: Mapping[str, Any] = chained.get("client_kwargs") or {}
        self._wanted = Wanted(
            store=store,
            spool=spool,
            config=config,
            endpoint_url=endpoint_url
            or str(chained.get("endpoint_url") or in_client.get("endpoint_url") or ""),
            profile=profile or str(chained.get("profile") or ""),
            region=region or str(in_client.get("region_name") or ""),
            idle_exit_s=float(idle_exit_s),
        )

    @functools.cached_property
    def daemon_config(self) -> Config:
        """The configuration of the daemon that this file system uses."""
        return daemon_config(self._wanted)

    def reach(self, is_needed: bool, may_start: bool) -> str:
        """The spool in which a daemon answers."""
        wanted, config = self._wanted, self.daemon_config
        return reach(config, wanted, is_needed=is_needed, may_start=may_start)

    def reach_key(self) -> Hashable:
        """What tells this daemon from others."""
        return self.daemon_config.store, self.daemon_config.spool, self.daemon_config.s3


def _chosen(named: str, store: str, spool: str) -> tuple[str, str]:
    """The store that a URL names after `ckpt::`, and the spool for it.

    Args:
        named: that store.
        store: of the call, or of fsspec's configuration; "" for none.
        spool: likewise.

    Raises:
        UsageError: the call has another store.
    """
    if not store or store_address(store) == store_address(named):
        return named, spool
    # fsspec adds its configuration to what a call says, without a word of what is from where.
    configured: Mapping[str, Any] = fsspec_config.conf.get("ckpt", {})
    if store != configured.get("store"):
        msg = f"two stores are given: {store} and {named}"
        raise UsageError(msg, hint="name one, by store= or after ckpt::")
    return named, "" if spool == configured.get("spool") else spool
