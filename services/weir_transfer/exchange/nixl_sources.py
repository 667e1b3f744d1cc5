"""Other hosts from whose memory pages are read by NIXL: each is tried before it is believed.

Of the first offer of a source the first page is read into memory of nobody's, and compared with its checksum. Where
that fails its pages come over streams, this time and from then on.
"""

import asyncio
import logging
from collections.abc import Callable

from weir.kv.movers.nixl import NixlAgent, NixlError, NixlReader
from weir.wire.v1 import pages_pb2

_log = logging.getLogger(__name__)
_MAX_KNOWN = 64


class NixlSources:
    """Of one arena. `agent` None: nothing is read by NIXL."""

    def __init__(self, agent: NixlAgent | None, page_bytes: int, on_failed_probe: Callable[[], None]) -> None:
        self._agent = agent
        self._page_bytes = page_bytes
        self._on_failed_probe = on_failed_probe
        self._verdicts: dict[bytes, bool] = {}
        """By the metadata of the sources' agents: whether the probe was right."""

    @property
    def reads(self) -> bool:
        return self._agent is not None

    async def try_open(self, address: str, offer: pages_pb2.OfferResponse) -> NixlReader | None:
        """To be closed. None: its pages come over streams."""
        agent, metadata = self._agent, offer.nixl_metadata
        if agent is None or not metadata or not offer.pages or self._verdicts.get(metadata) is False:
            return None
        first = offer.pages[0]
        try:
            reader = await asyncio.to_thread(agent.open, metadata, offer.nixl_address)
            if metadata not in self._verdicts:
                checksum = await asyncio.to_thread(reader.probe, first.page_id, self._page_bytes)
                if checksum != first.checksum:
                    raise NixlError("a page came with another checksum")
        except NixlError as error:
            _log.warning("pages of %s come over streams, since a probe by NIXL failed: %s", address, error)
            self._on_failed_probe()
            self._remember(metadata, is_right=False)
            return None
        if metadata not in self._verdicts:
            _log.info("pages of %s are read by NIXL", address)
            self._remember(metadata, is_right=True)
        return reader

    def _remember(self, metadata: bytes, *, is_right: bool) -> None:
        self._verdicts[metadata] = is_right
        while len(self._verdicts) > _MAX_KNOWN:
            del self._verdicts[next(iter(self._verdicts))]
