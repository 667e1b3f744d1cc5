"""What an answer must look like: the source of a grammar, as clients give it and as records keep it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MAX_GRAMMAR_BYTES = 60_000
"""Of the source in UTF-8: what a record has room for."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language in which the whole output must be; it ends where its grammar may, and only there.

    `source` is the text of a JSON schema, a regular expression (of the whole answer; Rust's syntax, without look-around
    and back-references), a JSON list of texts of which the answer is one, or a grammar in Lark's notation.
    """

    kind: GrammarKind
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> "Grammar":
        return cls("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        return cls("choice", json.dumps(list(texts), ensure_ascii=False, separators=(",", ":")))

    @property
    def num_bytes(self) -> int:
        """Of the source; a lone surrogate, which no grammar may have, counts too."""
        return len(self.source.encode("utf-8", "surrogatepass"))

    @property
    def digest(self) -> bytes:
        packed = f"{self.kind}\0{self.source}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()
