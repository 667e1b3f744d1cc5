"""The one way in which limits check their numbers and choices."""

from collections.abc import Collection


def check_range(limits: object, name: str, low: float, high: float, *, of: str = "") -> None:
    """Raises ValueError that names the field, its value and the range, behind `of`: whose limits they are."""
    value = getattr(limits, name)
    if not low <= value <= high:  # not a number is in no range
        raise ValueError(f"{_prefix(of)}{name} {value}: must be in [{low}, {high}]")


def check_choice(limits: object, name: str, known: Collection[str], *, of: str = "") -> None:
    """Raises ValueError that names the field, its value and what it may be."""
    value = getattr(limits, name)
    if value not in known:
        raise ValueError(f"{_prefix(of)}{name} {value!r}: is none of {', '.join(known)}")


def _prefix(of: str) -> str:
    return f"{of}: " if of else ""
