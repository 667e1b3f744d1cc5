"""How much an engine has to do, and to do it with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Sequences in the batch and before it, and what the pool holds."""

    num_running: int = 0
    num_waiting: int = 0
    num_held_pages: int = 0
    num_free_pages: int = 0
    num_used_pages: int = 0
    """In block tables."""
    num_filled_pages: int = 0
    """Of those, the ones in which at least one token is computed."""
    max_step_tokens: int = 0
    """Prompt tokens that a step gets at most, as steps go now."""

    @property
    def page_waste(self) -> float:
        """Share of the used pages in which there is nothing yet."""
        return 1 - self.num_filled_pages / self.num_used_pages if self.num_used_pages else 0.0
