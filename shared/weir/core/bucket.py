"""So much a minute, of which what was not used is kept for a minute."""


class Bucket:
    """Full at first. What is larger than the bucket passes when it is full, and is paid off afterwards."""

    def __init__(self, per_min: float, now_s: float) -> None:
        self._per_min = per_min
        self._level = per_min
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Below 0: being paid off."""
        self._refill(now_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until `amount` may be taken; 0.0: now."""
        self._refill(now_s)
        lacking = min(amount, self._per_min) - self._level
        return max(0.0, lacking * 60 / self._per_min)

    def full_in_s(self, now_s: float) -> float:
        """How long until it is full, if nothing is taken; 0.0: it is."""
        return max(0.0, (self._per_min - self.level(now_s)) * 60 / self._per_min)

    def empty_until_full_in(self, seconds: float, now_s: float) -> None:
        """It is full in `seconds` at the earliest."""
        self._level = min(self.level(now_s), self._per_min - seconds * self._per_min / 60)

    def take(self, amount: float, now_s: float) -> None:
        """Also a negative amount: something is given back."""
        self._refill(now_s)
        self._level = min(self._level - amount, self._per_min)

    def set_rate(self, per_min: float, now_s: float) -> None:
        """A higher rate gives at once what it allows beyond what was used up. A lower one leaves the bucket as long in
        getting full as it was: what was taken while that was allowed is paid off in the time that it would have taken,
        not at the new rate. Either way nobody waits longer than until the bucket would have been full."""
        self._refill(now_s)
        if per_min < self._per_min:
            self._level *= per_min / self._per_min
        else:
            self._level += per_min - self._per_min
        self._per_min = per_min

    def _refill(self, now_s: float) -> None:
        self._level = min(self._per_min, self._level + (now_s - self._at_s) * self._per_min / 60)
        self._at_s = now_s
