"""Values of labels that others choose: as many as are bounded, and the same ones for good."""

OTHER = "other"
"""The label of whoever came after the bound was reached."""


class StickyLabels:
    """The first `max_values` values have series of their own, all later ones share `OTHER`: a series that is there
    never changes what it counts."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._known: set[str] = set()
        self.num_dropped = 0
        """How often something was counted under `OTHER` for want of room."""

    def of(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) < self._max_values:
            self._known.add(value)
            return value
        self.num_dropped += 1
        return OTHER
