"""URLs as they may be shown."""


def masked_url(url: str) -> str:
    """The URL with its user, password or token replaced: for logs, errors, state files and terminals.

    Whatever comes before the last @ may be secret, since passwords are not always escaped as they should be.
    """
    head, at, where = url.rpartition("@")
    scheme, separator, _ = head.partition("://")
    if not at:
        return url
    return f"{scheme}://***@{where}" if separator else f"***@{where}"
