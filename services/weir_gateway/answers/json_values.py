"""Where a JSON value ends, found while it comes."""

import re

_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_END_OF_SCALAR = re.compile(r"[,}\]\s]")


class ValueScanner:
    """Follows one value from its first character on. It counts brackets outside of strings and checks nothing else:
    a model's slip inside of a value stays in it."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_scalar = False
        self._in_string = False
        self._is_escaped = False

    def advance(self, text: str, start: int, end: int) -> int:
        """Reads text[start:end]. Returns where the value ends, if it is complete then, else `end`, or the text's."""
        position, end = start, min(end, len(text))
        while position < end and not self.is_complete:
            if self._in_string:
                position = self._advance_in_string(text, position, end)
            elif self._is_scalar or (not self._depth and text[position] not in '{["'):
                self._is_scalar = True
                found = _END_OF_SCALAR.search(text, position, end)
                self.is_complete = found is not None
                position = end if found is None else found.start()
            else:
                position = self._advance_outside(text, position, end)
        return position

    def _advance_in_string(self, text: str, position: int, end: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        found = _QUOTE_OR_ESCAPE.search(text, position, end)
        if found is None:
            return end
        if found.group() == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_complete = not self._depth
        return found.end()

    def _advance_outside(self, text: str, position: int, end: int) -> int:
        found = _BRACKET_OR_QUOTE.search(text, position, end)
        if found is None:
            return end
        if found.group() == '"':
            self._in_string = True
        else:
            self._depth += 1 if found.group() in "{[" else -1
            self.is_complete = self._depth <= 0
        return found.end()
