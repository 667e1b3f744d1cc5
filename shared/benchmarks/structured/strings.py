"""Strings of generated schemas: of a length, of a pattern, of a format, each with a way to draw strings that fit."""

import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from random import Random
from typing import Any, NamedTuple

LETTERS = 'abcxyz ABC019_-.,:/äéßñжλ漢字か🙂"\\\n\t/{}[]'
"""What strings of documents are made of: what JSON escapes, what it might take for structure, one to four bytes."""
_WORDS = ("red", "green", "blue", "on", "off", "open", "closed", "größer", "naïve", "да", "日本", "a b", "x-1", "")
_ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in ".+*?()[]{}|^$\\/"})


class StringKind(NamedTuple):
    """Keywords beside `type: string`, and a string that they allow."""

    keywords: dict[str, Any]
    draw: Callable[[Random], str]


def string_of(random: Random) -> StringKind:
    return random.choice((_free, _of_length, _of_pattern, _of_pattern, _of_format))(random)


def words_of(random: Random, most: int) -> list[str]:
    return random.sample(_WORDS, random.randint(1, most))


def text_of(random: Random, fewest: int, most: int) -> str:
    return "".join(random.choice(LETTERS) for _ in range(random.randint(fewest, most)))


def pattern_of(random: Random) -> tuple[str, Callable[[Random], str]]:
    """Of a whole text, without anchors, and a way to draw texts of it."""
    parts = [random.choice(_PARTS)(random) for _ in range(random.randint(1, 4))]
    return "".join(pattern for pattern, _ in parts), lambda drawing: "".join(draw(drawing) for _, draw in parts)


def _free(random: Random) -> StringKind:
    del random
    return StringKind({}, lambda drawing: text_of(drawing, 0, 12))


def _of_length(random: Random) -> StringKind:
    fewest, most = random.randint(0, 5), random.randint(5, 40)
    keywords = {"minLength": fewest, "maxLength": most}
    if random.random() < 0.3:
        del keywords["minLength"]
    return StringKind(keywords, lambda drawing: text_of(drawing, fewest, min(most, 16)))


def _of_pattern(random: Random) -> StringKind:
    pattern, draw = pattern_of(random)
    match random.randrange(4):
        case 0:  # found anywhere in the string
            return StringKind({"pattern": pattern}, lambda drawing: f"{text_of(drawing, 0, 4)}{draw(drawing)}!")
        case 1:
            return StringKind({"pattern": f"^{pattern}"}, lambda drawing: draw(drawing) + text_of(drawing, 0, 4))
        case _:
            return StringKind({"pattern": f"^{pattern}$"}, draw)


def _of_format(random: Random) -> StringKind:
    name = random.choice(tuple(_FORMATS))
    return StringKind({"format": name}, _FORMATS[name])


_Part = tuple[str, Callable[[Random], str]]


def _signs(random: Random) -> _Part:
    written, members = random.choice(
        (("[A-Z]", "AMZ"), ("[0-9]", "059"), ("[a-z0-9_]", "az_7"), ("[^\\s]", "x!é漢"), ("[ä-ÿ]", "äö"), (".", "a é"))
    )
    fewest = random.randint(0, 2)
    most = fewest + random.randint(1, 3)
    times = random.choice((f"{{{fewest},{most}}}", "+", "*", f"{{{most}}}"))
    fewest, most = {"+": (1, 4), "*": (0, 4), f"{{{most}}}": (most, most)}.get(times, (fewest, most))
    return written + times, lambda drawing: "".join(drawing.choices(members, k=drawing.randint(fewest, most)))


def _one_of_words(random: Random) -> _Part:
    words = words_of(random, 3)
    return f"({'|'.join(word.translate(_ESCAPED) for word in words)})", lambda drawing: drawing.choice(words)


def _literal(random: Random) -> _Part:
    text = random.choice(("-", ".", ":", "/", "v", "id_", "№", "$", "a+b"))
    return text.translate(_ESCAPED), lambda _: text


def _optional(random: Random) -> _Part:
    pattern, draw = _literal(random)
    return f"({pattern})?", lambda drawing: draw(drawing) if drawing.random() < 0.5 else ""


_PARTS: tuple[Callable[[Random], _Part], ...] = (_signs, _signs, _one_of_words, _literal, _optional)


def _moment(random: Random) -> datetime:
    return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=random.randint(0, 10**9))


_FORMATS: dict[str, Callable[[Random], str]] = {
    "date": lambda random: date.fromordinal(random.randint(700_000, 750_000)).isoformat(),
    "time": lambda random: _moment(random).strftime("%H:%M:%SZ"),
    "date-time": lambda random: _moment(random).strftime("%Y-%m-%dT%H:%M:%SZ"),
    "duration": lambda random: f"P{random.randint(1, 9)}DT{random.randint(1, 9)}H",
    "email": lambda random: f"a{random.randint(0, 99)}.b@example.org",
    "hostname": lambda random: f"h{random.randint(0, 99)}.example.org",
    "ipv4": lambda random: str(IPv4Address(random.getrandbits(32))),
    "ipv6": lambda random: IPv6Address(random.getrandbits(128)).exploded,
    "uuid": lambda random: str(uuid.UUID(int=random.getrandbits(128), version=4)),
    "uri": lambda random: f"https://example.org/{random.randint(0, 99)}?q=a#b",
}
