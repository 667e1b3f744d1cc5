"""What the bodies of APIs beside OpenAI's older ones share: sampling, Weir's own fields, and how an option is made of
each."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from weir.core.errors import FieldViolation
from weir.core.options import NUMBER_RULES, GenerateOptions
from weir_gateway.frontends.bodies.checks import is_too_long, shown
from weir_gateway.frontends.bodies.unknown_fields import KnownFields
from weir_gateway.frontends.openai.fields import CHATS_REASONING, COMMON_NEUTRAL, REASONS
from weir_gateway.frontends.openai.schema import ChatBody

MAX_VIOLATIONS = 16
"""That are told of one body."""
_NEUTRAL_OF_CHATS: Mapping[str, tuple[Any, ...]] = {
    **CHATS_REASONING,
    "n": (1,),
    "response_format": ({"type": "text"},),
}
"""Of fields that chats have, and these bodies have not."""


class AdapterBody(BaseModel):
    """What OpenAI and Anthropic have in common, what vLLM has beyond, and Weir's own, as `/v1/completions` names it."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    lane: str | None = None
    priority: int | None = None
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    expected_output_tokens: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None

    def options(self, **own: Any) -> GenerateOptions:
        """`own`: those whose fields have other names in each API. What a body does not declare is none of its options,
        though it has an attribute."""
        names = [rule.name for rule in NUMBER_RULES if rule.name in type(self).model_fields]
        numbers: dict[str, Any] = {name: getattr(self, name) for name in names}
        return GenerateOptions(
            model=self.model or "",
            lane=self.lane or "",
            cache_salt=self.cache_salt or "",
            skips_prefix_cache=self.cache_prompt is False,
            **(numbers | own),
        )


def known_fields(
    body_type: type[AdapterBody],
    neutral: Mapping[str, tuple[Any, ...]],
    reasons: Mapping[str, str],
    ignored: frozenset[str],
) -> KnownFields:
    """Those of one API beside what `body_type` declares. What chats have, or refuse, and it has not, is refused."""
    of_chats = {**dict.fromkeys(ChatBody.model_fields, ()), **COMMON_NEUTRAL, **_NEUTRAL_OF_CHATS}
    declared = frozenset(body_type.model_fields)
    undeclared = {name: values for name, values in of_chats.items() if name not in declared}
    return KnownFields(declared, {**undeclared, **neutral}, {**REASONS, **reasons}, ignored)


def text_of(
    value: object, field_name: str, types: frozenset[str], ignored: frozenset[str], violations: list[FieldViolation]
) -> str:
    """Of a content that is a text or a list of parts, whose texts are joined as they are.

    `types`: of parts that are text; `ignored`: of those that are dropped, since they change nothing. What else there is
    goes to `violations`.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        violations.append(FieldViolation(field_name, "must be a text, or a list of parts"))
        return ""
    texts = []
    if is_too_long(value, field_name, violations):
        return ""
    for index, part in enumerate(value):
        if len(violations) >= MAX_VIOLATIONS:
            break
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if isinstance(kind, str) and kind in ignored:
            continue
        if isinstance(kind, str) and kind in types and isinstance(text, str):
            texts.append(text)
        else:
            wanted = f"must be a part of type {' or '.join(sorted(types))} with a text"
            violations.append(FieldViolation(f"{field_name}[{index}]", f"is of type {shown(kind)}; {wanted}"))
    return "".join(texts)
