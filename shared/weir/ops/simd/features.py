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
    AMX = "amx"

    @property
    def vectors(self) -> "InstructionSet":
        """What all is computed with but products of many rows, which alone AMX is for."""
        return InstructionSet.AVX512_VNNI if self is InstructionSet.AMX else self


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What the compiler may assume about this processor, which is what `NUMBA_CPU_FEATURES` says where it is set."""

    has_avx2: bool
    has_fma: bool
    has_f16c: bool
    has_avx_vnni: bool
    has_avx512_vnni: bool
    has_amx_int8: bool

    @property
    def instruction_sets(self) -> tuple[InstructionSet, ...]:
        """Those that are all there, the fastest last. Whether AMX runs, too, says `available_instruction_sets`."""
        has_avx2 = self.has_avx2 and self.has_fma and self.has_f16c
        available = {
            InstructionSet.PORTABLE: True,
            InstructionSet.AVX2: has_avx2,
            InstructionSet.AVX_VNNI: has_avx2 and self.has_avx_vnni,
            InstructionSet.AVX512_VNNI: has_avx2 and self.has_avx512_vnni,
            InstructionSet.AMX: has_avx2 and self.has_avx512_vnni and self.has_amx_int8,
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
        has_amx_int8=has("amx-tile", "amx-int8"),
    )


def parse_features(text: str) -> dict[str, bool]:
    """As LLVM writes them: `+avx2,-avx512f`."""
    names = (item.strip() for item in text.split(",") if item.strip())
    return {name.lstrip("+-"): not name.startswith("-") for name in names}


def available_instruction_sets() -> tuple[InstructionSet, ...]:
    """Those that run here, the fastest last. Where AMX is announced this tries it, once a start of the machine."""
    announced = cpu_features().instruction_sets
    return tuple(one for one in announced if one is not InstructionSet.AMX or amx_problem() is None)


@cache
def amx_problem() -> str | None:
    """Why AMX is not used for products of many rows; None where it can be."""
    if InstructionSet.AMX not in cpu_features().instruction_sets:
        return "amx-tile, amx-int8 and AVX512-VNNI are not all there, or the operating system does not save tiles"
    from weir.ops.simd.amx_probe import find_problem  # noqa: PLC0415  (no other processor needs it)

    return find_problem()


def instruction_set() -> InstructionSet:
    """The fastest one that runs here, or the one that `WEIR_CPU_KERNELS` names.

    Raises:
        ValueError: `WEIR_CPU_KERNELS` names none, or one that this processor lacks.
    """
    wanted = os.environ.get(_ENVIRONMENT)
    if wanted != InstructionSet.AMX and wanted in cpu_features().instruction_sets:
        return InstructionSet(wanted)
    available = available_instruction_sets()
    if not wanted:
        return available[-1]
    if wanted not in available:
        names = ", ".join(available)
        raise ValueError(f"{_ENVIRONMENT} is {wanted!r}; this processor runs {names}. Leave it out for the fastest")
    return InstructionSet(wanted)
