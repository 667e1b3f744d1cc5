"""Opens the tiers that the settings name, the nearest first: memory of the host, files, a Valkey that hosts share."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from weir.kv.memory.page_access import PageAccess
from weir.kv.tiers.file_store import PageFileStore
from weir.kv.tiers.memory_store import PageMemoryStore
from weir.kv.tiers.page_header import PageLayout
from weir.kv.tiers.page_store import PageStore
from weir.kv.tiers.valkey_address import parse_valkey_url
from weir.runtime.config import ConfigError
from weir.runtime.page_tiers import check_valkey_here
from weir_transfer.config import TransferConfig
from weir_transfer.tier_keeper import KeeperSettings, PageTier

_log = logging.getLogger(__name__)


def open_tiers(config: TransferConfig, layout: PageLayout, pages: PageAccess) -> Sequence[PageTier]:
    """Takes as long as a look at what is there. Raises ConfigError, UntrustedFolder, OSError."""
    tiers = []
    try:
        if config.page_memory_bytes:
            memory = PageMemoryStore(layout.page_bytes, config.page_memory_bytes, pages.host_buffer)
            tiers.append(PageTier("memory", memory, KeeperSettings(math.inf)))
        if config.page_files_dir:
            files = PageFileStore(Path(config.page_files_dir).absolute(), layout, config.page_files_bytes)
            settings = KeeperSettings(config.page_files_write_bytes_per_s, config.page_files_min_uses)
            tiers.append(PageTier("files", files, settings))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.page_valkey_url:
        valkey = _open_valkey(config, layout)
        tiers.append(PageTier("valkey", valkey, KeeperSettings(config.page_valkey_write_bytes_per_s)))
    for tier in tiers:
        _log.info("%d pages of this model in %s", tier.store.num_pages, tier.name)
    return tiers


def _open_valkey(config: TransferConfig, layout: PageLayout) -> PageStore:
    check_valkey_here(config)
    # Not before: a plain install has no client.
    from weir.kv.tiers.valkey_client import ValkeySettings  # noqa: PLC0415
    from weir.kv.tiers.valkey_store import ValkeyPageStore  # noqa: PLC0415

    settings = ValkeySettings(
        parse_valkey_url(config.page_valkey_url),
        config.page_valkey_password_file,
        config.page_valkey_ca_file,
        config.page_valkey_ttl_s,
        config.page_valkey_timeout_ms / 1000,
    )
    return ValkeyPageStore(settings, layout)
