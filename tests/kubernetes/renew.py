"""Writes what the chart comes to into renders/: `make chart-renders`."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import yaml
from tests.kubernetes.chart import VALUES_FILES, rendered

FOLDER = Path(__file__).parent / "renders"
_MAX_CHARS = 4096


def shown(name: str) -> str:
    """All objects of a values file, as text that says little of how the templates wrote them."""
    objects = [_short(one) for one in rendered(name).all]
    return yaml.safe_dump_all(objects, sort_keys=True, width=120)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        shortened = [_short(one) for one in value]
        text = str(shortened)
        return shortened if len(text) <= 4 * _MAX_CHARS else [_digest(text)]
    return _digest(value) if isinstance(value, str) and len(value) > _MAX_CHARS else value


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def main() -> int:
    for name in VALUES_FILES:
        (FOLDER / f"{name}.yaml").write_text(shown(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
