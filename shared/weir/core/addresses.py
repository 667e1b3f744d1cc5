"""Addresses of servers, HOST:PORT or unix:/PATH, and who can reach them."""

import ipaddress

UNIX = "unix:"


def is_unix(address: str) -> bool:
    return address.startswith(UNIX)


def is_of_this_machine(address: str) -> bool:
    """Whether no other machine reaches it."""
    return is_unix(address) or is_loopback(address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
