"""What can become of bytes on their way: one bit is another, some come twice, they end early, they stand still."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FlipBit:
    """Of byte `at_byte`, the first being 1; `bit` 0 to 7."""

    at_byte: int
    bit: int = 0


@dataclass(frozen=True)
class Repeat:
    """The `num_bytes` that end with byte `at_byte` come twice."""

    at_byte: int
    num_bytes: int = 1


@dataclass(frozen=True)
class Truncate:
    """Byte `at_byte` is the last that arrives; the sender does not notice."""

    at_byte: int


@dataclass(frozen=True)
class Stall:
    """Nothing arrives after byte `at_byte`, and the connection stays open."""

    at_byte: int


@dataclass(frozen=True)
class Reset:
    """Byte `at_byte` is the last that arrives, and both ends are told that the connection is gone."""

    at_byte: int


Fault = FlipBit | Repeat | Truncate | Stall | Reset
Ending = Truncate | Stall | Reset


class FaultyStream:
    """Bytes pass in chunks, and it does not matter how they are cut. Each fault happens once."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        """Those to come, by their bytes."""
        self._passed = bytearray()
        """Since they were set, while some are to come: what can be repeated."""

    def set_faults(self, *faults: Fault) -> None:
        """These and no others; their bytes are counted from now on. Raises ValueError, and changes nothing then."""
        for fault in faults:
            if fault.at_byte < 1 or sum(other.at_byte == fault.at_byte for other in faults) > 1:
                raise ValueError(f"{fault}: bytes are counted from 1, and to each happens one thing")
            if isinstance(fault, Repeat) and not 1 <= fault.num_bytes <= fault.at_byte:
                raise ValueError(f"{fault}: num_bytes is 1 to {fault.at_byte}, as many as have passed by then")
            if isinstance(fault, FlipBit) and not 0 <= fault.bit < 8:
                raise ValueError(f"{fault}: bit is 0 to 7")
        self._faults = sorted(faults, key=lambda fault: fault.at_byte)
        self._passed.clear()

    def take(self, chunk: bytes) -> Sequence[tuple[bytes, Ending | None]]:
        """What arrives of it, and what happens after each piece."""
        pieces: list[tuple[bytes, Ending | None]] = []
        while self._faults and self._faults[0].at_byte <= len(self._passed) + len(chunk):
            fault = self._faults.pop(0)
            length = fault.at_byte - len(self._passed)
            piece, chunk = chunk[:length], chunk[length:]
            self._passed += piece
            if isinstance(fault, FlipBit):
                piece = piece[:-1] + bytes([piece[-1] ^ 1 << fault.bit])
            elif isinstance(fault, Repeat):
                piece += self._passed[-fault.num_bytes :]
            pieces.append((piece, fault if isinstance(fault, Ending) else None))
        if self._faults:
            self._passed += chunk
        return [*pieces, (chunk, None)]
