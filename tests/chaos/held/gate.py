"""A gate that stops the steps of a worker in another process: a file with an order, and a file that answers it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Order:
    """Steps stand still after `num_steps` more; or, `swapped_seed`, as soon as something has been swapped out and a
    step lacks the sequence of this seed. `name` is new with each order."""

    name: str
    num_steps: int = 0
    swapped_seed: int | None = None


class Gate:
    """Open while there is no order."""

    def __init__(self, directory: Path, role: str) -> None:
        self._order_path = directory / f"gate-{role}.json"
        self._held_path = directory / f"held-{role}"

    def close(self, order: Order) -> None:
        unfinished = self._order_path.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(order)))
        unfinished.replace(self._order_path)

    def open(self) -> None:
        self._order_path.unlink(missing_ok=True)

    def holds(self, order: Order) -> bool:
        """Whether a step stands still because of this order."""
        return self._held_path.exists() and self._held_path.read_text() == order.name

    def try_read(self) -> Order | None:
        try:
            return Order(**json.loads(self._order_path.read_text()))
        except FileNotFoundError:
            return None

    def mark_held(self, order: Order) -> None:
        if not self.holds(order):
            unfinished = self._held_path.with_suffix(".new")
            unfinished.write_text(order.name)
            unfinished.replace(self._held_path)
