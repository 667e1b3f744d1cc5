"""Settings of page tiers that a stack and its transfer services have alike."""

import re
from pathlib import Path
from typing import Protocol

from weir.core.addresses import is_loopback
from weir.core.credentials import masked_url
from weir.core.device import Device
from weir.core.fields import ByteSize
from weir.kv.tiers.valkey_address import parse_valkey_url
from weir.runtime.config import ConfigError
from weir.runtime.extras import check_extra

PAGE_VALKEY_HELP = (
    "Valkey or Redis where computed pages outlive the arena, for all hosts: redis[s]://[USER@]HOST[:PORT][/DATABASE]. "
    "Empty: none."
)
PAGE_VALKEY_INSECURE_HELP = (
    "Whether pages may cross the network to it without TLS, where whoever reads that network may read them."
)
PAGE_MEMORY_HELP = "Memory of the host for pages that have no room in an arena on a device. 0: none."


class ValkeyFields(Protocol):
    @property
    def page_valkey_url(self) -> str: ...

    @property
    def page_valkey_password_file(self) -> str: ...

    @property
    def page_valkey_ca_file(self) -> str: ...

    @property
    def page_valkey_insecure(self) -> bool: ...


def check_page_valkey(config: ValkeyFields) -> None:
    """Raises ValueError, naming the field. What is wrong with a URL is said without its password."""
    if not config.page_valkey_url:
        for name in ("page_valkey_password_file", "page_valkey_ca_file"):
            if getattr(config, name):
                raise ValueError(f"{name} {getattr(config, name)!r}: is of no use without page_valkey_url")
        return
    try:
        address = parse_valkey_url(config.page_valkey_url)
    except ValueError as error:
        raise ValueError(f"page_valkey_url {_shown(config.page_valkey_url)!r}: {error}") from None
    if config.page_valkey_ca_file and not address.is_encrypted:
        raise ValueError(f"page_valkey_ca_file {config.page_valkey_ca_file!r}: needs a page_valkey_url with rediss://")
    if not (address.is_encrypted or config.page_valkey_insecure or is_loopback(address.host)):
        raise ValueError(
            f"page_valkey_url {str(address)!r}: pages can be turned back into text, and would cross the network "
            "unencrypted; give rediss://, or set page_valkey_insecure where that network is private"
        )


def check_valkey_here(config: ValkeyFields) -> None:
    """What a transfer service of this machine needs for it. Raises ExtraMissing, ConfigError."""
    if not config.page_valkey_url:
        return
    check_extra("valkey", "page_valkey_url")
    path = config.page_valkey_ca_file
    if path and not Path(path).is_file():
        raise ConfigError(f"page_valkey_ca_file {path!r}: is no file here; give one with certificates of authorities")


def check_page_memory(page_memory_bytes: ByteSize, device: Device) -> None:
    """Raises ValueError: an arena in memory of the host is that memory already."""
    if page_memory_bytes < 0:
        raise ValueError(f"page_memory_bytes {page_memory_bytes}: must not be negative")
    if page_memory_bytes and device == "cpu":
        raise ValueError(
            f"page_memory_bytes {page_memory_bytes}: is for arenas on a device; that of device 'cpu' is memory of the "
            "host already: give arena_bytes more"
        )


def _shown(url: str) -> str:
    """Without its password, which may stand where it does not belong: after ? or #."""
    head = re.split("[?#]", url, maxsplit=1)[0]
    if "@" not in url[len(head) :]:
        return masked_url(head)
    scheme, separator, _ = head.partition("://")  # whether it begins before that or after it cannot be told
    return f"{scheme}://***" if separator else "***"
