"""The API keys of the tenants that a load is sent for. They come from a file: a command line is seen by everybody."""

from pathlib import Path

from weir.bench.serving.load import LoadConfig


def read_keys(path: Path | None, default_key: str) -> dict[str, str]:
    """Tenant -> key, of lines `NAME=KEY`; `""` -> the key of requests that name no tenant. Raises ValueError."""
    keys = {"": default_key} if default_key else {}
    if path is None:
        return keys
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-keys {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, key = line.partition("=")
        if not (equals and name.strip() and key.strip()) or name.strip() in keys:
            raise ValueError(f"--api-keys {path}, line {number}: must be NAME=KEY, each name once")
        keys[name.strip()] = key.strip()
    return keys


def check_keys(config: LoadConfig) -> None:
    """Raises ValueError for a tenant of the mix whose key is not known: nothing else tells a server who asks."""
    missing = [name for name in config.tenants.shares if name not in config.api_keys]
    if missing:
        raise ValueError(f"--tenant-mix: no key of {', '.join(missing)}; name a file of keys with --api-keys")
