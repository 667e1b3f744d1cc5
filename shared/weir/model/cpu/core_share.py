"""How many cores a forward pass may use."""

from typing import Protocol


class CoreShare(Protocol):
    """Asked at the start of every piece of work of some milliseconds."""

    @property
    def most(self) -> int:
        """Never more than this."""
        ...

    def begin(self) -> int:
        """A piece of work begins; the threads that it may use, at least 1."""
        ...

    def end(self) -> None:
        """It has ended."""
        ...

    def take_mean_others(self) -> float:
        """How many other workers of the machine computed meanwhile: the mean over the pieces of work since this was
        last asked; 0 without one."""
        ...


class FixedShare:
    """Always the same number of threads."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, expected at least 1")
        self.most = num_threads

    def begin(self) -> int:
        return self.most

    def end(self) -> None:
        """Nothing was taken."""

    def take_mean_others(self) -> float:
        """0: it knows of none."""
        return 0.0
