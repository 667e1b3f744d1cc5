"""Which vector instructions the kernels may use here.

All of them give the same bits; they differ in speed only.
"""

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_ENVIRONMENT = "WEIR_CPU_KERNELS"


class InstructionSet(enum.StrEnum):
    """How 8-bit products are summed, the fastest last."""

    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX_VNNI = "avx-vnni"
    AVX512_VNNI = "avx512-vnni"


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What the compiler may assume about this processor, which is what `NUMBA_CPU_FEATURES` says where it is set."""

    has_avx2: bool
    has_fma: bool
    has_f16c: bool
    has_avx_vnni: bool
    has_avx512_vnni: bool

    @property
    def instruction_sets(self) -> tuple[InstructionSet, ...]:
        """Those that run here, the fastest last."""
        has_avx2 = self.has_avx2 and self.has_fma and self.has_f16c
        available = {
            InstructionSet.PORTABLE: True,
            InstructionSet.AVX2: has_avx2,
            InstructionSet.AVX_VNNI: has_avx2 and self.has_avx_vnni,
            InstructionSet.AVX512_VNNI: has_avx2 and self.has_avx512_vnni,
        }
        return tuple(one for one in InstructionSet if available[one])


@cache
def cpu_features() -> CpuFeatures:
    """Asks the compiler's library (numba's llvmlite), which knows what the operating system saves and restores too."""
    import llvmlite.binding  # noqa: PLC0415  (importing this module must not need numba)
    import numba  # noqa: PLC0415

    configured = numba.config.CPU_FEATURES
    features = parse_features(configured) if configured is not None else llvmlite.binding.get_host_cpu_features()
    return features_from(features)


def features_from(features: Mapping[str, bool]) -> CpuFeatures:
    """`features` by LLVM's names; what is not named is not there."""

    def has(*names: str) -> bool:
        return all(features.get(name, False) for name in names)

    has_avx512_vnni = has("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
    return CpuFeatures(
        has_avx2=has("avx2"),
        has_fma=has("fma"),
        has_f16c=has("f16c"),
        has_avx_vnni=has("avxvnni") or has_avx512_vnni,
        has_avx512_vnni=has_avx512_vnni,
    )


def parse_features(text: str) -> dict[str, bool]:
    """As LLVM writes them: `+avx2,-avx512f`."""
    names = (item.strip() for item in text.split(",") if item.strip())
    return {name.lstrip("+-"): not name.startswith("-") for name in names}


def instruction_set() -> InstructionSet:
    """The fastest one that runs here, or the one that `WEIR_CPU_KERNELS` names.

    Raises:
        ValueError: `WEIR_CPU_KERNELS` names none, or one that this processor lacks.
    """
    available = cpu_features().instruction_sets
    wanted = os.environ.get(_ENVIRONMENT)
    if not wanted:
        return available[-1]
    if wanted not in available:
        names = ", ".join(available)
        raise ValueError(f"{_ENVIRONMENT} is {wanted!r}; this processor runs {names}. Leave it out for the fastest")
    return InstructionSet(wanted)
