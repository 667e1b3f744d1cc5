"""What makes two requests the same: all that decides which tokens the answer has, and nothing else."""

import array
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from weir.bus.keys import BODY_DIGEST_BYTES, key_name
from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.keys.claims import KeyedBody
from weir_gateway.requests.validation import CheckedRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def keyed_body(checked: CheckedRequest) -> KeyedBody:
    """Raises InvalidRequest for a place that no answer to this request reaches."""
    request, max_tokens = checked.client_request, checked.stop_rules.max_tokens
    options, names = request.options, request.names
    if options.resume_from is not None and options.resume_from > max_tokens:
        description = f"is {options.resume_from}; the answer has at most {max_tokens} tokens"
        raise InvalidRequest([FieldViolation(names["resume_from"], description)])
    return KeyedBody(
        key_name=key_name(checked.scope.tenant, options.idempotency_key),
        body_digest=body_digest(checked),
        seed=checked.sampling.seed.to_bytes(8, "big"),
        resume_from=options.resume_from,
        key_field=names["idempotency_key"],
        resume_field=names["resume_from"],
    )


def body_digest(checked: CheckedRequest) -> bytes:
    """The same by whichever API it came. Values at their defaults do not count, so that a gateway which knows one more
    option makes the same digest of a request without it. Numbers of tokens are those asked for: what the context leaves
    of them depends on the workers that a gateway has heard of."""
    request, options = checked.client_request, checked.client_request.options
    digest = hashlib.blake2b(digest_size=BODY_DIGEST_BYTES, person=b"weir body")
    parts: list[tuple[str, object]] = [("operation", request.operation.value), ("model", checked.model.name)]
    parts += [("seed", options.seed), ("stop", options.stop), ("include_stop", options.include_stop)]
    parts += [entry for entry in _given(checked.sampling) if entry[0] != "seed"]
    parts += [("max_tokens", options.max_tokens), ("min_tokens", options.min_tokens or 0)]
    parts += [entry for entry in _given(checked.stop_rules) if entry[0] not in ("max_tokens", "min_tokens")]
    for name, value in parts:
        digest.update(f"{name}={_plain(value)!r};".encode("utf-8", "surrogatepass"))
    digest.update(array.array("I", checked.prompt_token_ids).tobytes())
    return digest.digest()


def _given(values: "DataclassInstance") -> Iterator[tuple[str, object]]:
    for entry in sorted(fields(values), key=lambda entry: entry.name):
        value = getattr(values, entry.name)
        if entry.default is MISSING or _plain(value) != _plain(entry.default):
            yield entry.name, value


def _plain(value: object) -> object:
    """gRPC carries 32-bit floats, JSON more."""
    if isinstance(value, float):
        return struct.pack("<f", value)
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
