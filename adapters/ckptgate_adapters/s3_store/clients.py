"""The client of one loop: s3fs's session, made at its first use, and anew when it was refused.

It owns the rule that credentials are looked for again once the service has refused those that a
client had: those of a file are read once by whoever makes a client, and tools that renew them write
another file. What is under way goes on with the client that it began with. Loop only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any, Final, cast

import botocore.handlers
import s3fs
from botocore.exceptions import BotoCoreError

from ckptgate.errors import ConfigError
from ckptgate_adapters.s3_store.location import S3Options

__all__ = ["Client", "Clients"]

_RENEW_S: Final = 30.0
"""Between two looks for other credentials: making a client takes a tenth of a second."""
_EXPECT: Final[Any] = cast("Any", botocore.handlers).add_expect_header
_CONTROL_CONNECTIONS: Final = 4

_HOST_HINT: Final = (
    "--endpoint-url https://HOST[:PORT]; a host's name has letters, digits, dots and hyphens"
)

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Client:
    """One client.

    Attributes:
        fs: of s3fs, which made it.
        api: aiobotocore's own, on which requests are made.
        since_s: by the loop's clock.
        users: who has it now.
        is_refused: its credentials were.
    """

    fs: Any
    api: Any
    since_s: float
    users: int = 0
    is_refused: bool = False


class Clients:
    """The one that new requests use, and those that old ones still use.

    Args:
        options: how the service is spoken to.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = asyncio.Lock()
        self._current: Client | None = None
        self._retired: list[Client] = []

    async def take(self) -> Client:
        """The client for a request, to be given back after it."""
        if self._is_due():
            async with self._lock:
                if self._is_due():
                    await self._renew()
        assert self._current is not None
        self._current.users += 1
        return self._current

    async def give_back(self, client: Client) -> None:
        """The request is over."""
        client.users -= 1
        if client in self._retired and not client.users:
            self._retired.remove(client)
            await _close(client)

    def refuse(self, client: Client) -> None:
        """The service doesn't take its credentials, or it has none."""
        client.is_refused = True

    async def close(self) -> None:
        """Close all connections."""
        clients = [*self._retired, *([self._current] if self._current is not None else [])]
        self._retired, self._current = [], None
        for client in clients:
            await _close(client)

    def _is_due(self) -> bool:
        client = self._current
        if client is None:
            return True
        return client.is_refused and _now_s() - client.since_s >= _RENEW_S

    async def _renew(self) -> None:
        _check_bundle(self._options)
        try:
            fs = _file_system(self._options)
            await fs.set_session()
            api = await fs.get_s3()
        except BotoCoreError:
            raise
        except ValueError as exc:
            # What isn't an error of the client's own: the name of a host that it doesn't take.
            msg = f"the service can't be spoken to as it is configured: {exc}"
            raise ConfigError(msg, subject="s3", hint=_HOST_HINT) from exc
        # With it, each part would wait for a round trip before its first byte.
        api.meta.events.unregister("before-call.s3", _EXPECT)
        old, self._current = self._current, Client(fs=fs, api=api, since_s=_now_s())
        if old is None:
            return
        _log.info("s3-credentials-looked-for-again")
        if old.users:
            self._retired.append(old)
        else:
            await _close(old)


def _check_bundle(options: S3Options) -> None:
    """The client says of a file that isn't there only that some file isn't."""
    bundle = options.ca_bundle or os.environ.get("AWS_CA_BUNDLE", "")
    if bundle and not os.path.exists(bundle):
        msg = f"the file of certificates {bundle!r} is not there"
        raise ConfigError(msg, subject="s3", hint="s3.ca_bundle, or AWS_CA_BUNDLE")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _close(client: Client) -> None:
    # It was made by the file system, which has no call for that.
    await client.api.__aexit__(None, None, None)


def _file_system(options: S3Options) -> Any:
    config: dict[str, Any] = {
        # Retries are ours: each layer below that has its own would make a lost reply a false one.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.stall_s,
        "max_pool_connections": options.max_parallel + _CONTROL_CONNECTIONS,
        # Checksums are ours, too: CRC64NVME of all bytes, which also guards an unsigned payload.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        # The client signs URLs in an old way else.
        "signature_version": "s3v4",
        "s3": {
            "payload_signing_enabled": False,
            "addressing_style": "path" if options.path_style else "auto",
        },
    }
    client: dict[str, Any] = {}
    if options.region:
        client["region_name"] = options.region
    if options.ca_bundle:
        client["verify"] = options.ca_bundle
    more = {"profile": options.profile} if options.profile else {}
    return cast("Any", s3fs).S3FileSystem(
        anon=options.anon,
        endpoint_url=options.endpoint_url or None,
        client_kwargs=client,
        config_kwargs=config,
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
        **more,
    )
