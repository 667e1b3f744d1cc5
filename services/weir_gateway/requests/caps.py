"""What a request may ask for where its tenant or its lane caps it: the smaller of both, with whose it is."""

from dataclasses import dataclass

from weir.core.caps import RequestCaps
from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.requests.client_request import ClientRequest, TokenIds


@dataclass(frozen=True, slots=True)
class Cap:
    """`owner` as people read it: lane 'batch'."""

    value: int
    owner: str

    @property
    def described(self) -> str:
        return f"{self.owner} takes at most {self.value}"


@dataclass(frozen=True, slots=True)
class CapsInForce:
    """None: no cap."""

    n: Cap | None = None
    top_k: Cap | None = None
    output_tokens: Cap | None = None
    sequence_tokens: Cap | None = None

    @classmethod
    def of(cls, tenant: str, tenant_caps: RequestCaps, lane: str, lane_caps: RequestCaps) -> "CapsInForce":
        def smaller(of_tenant: int, of_lane: int) -> Cap | None:
            caps = [Cap(value, owner) for value, owner in ((of_tenant, of), (of_lane, where)) if value]
            return min(caps, key=lambda cap: cap.value, default=None)

        of, where = f"tenant {tenant!r}", f"lane {lane!r}"
        return cls(
            smaller(tenant_caps.max_n, lane_caps.max_n),
            smaller(tenant_caps.max_top_k, lane_caps.max_top_k),
            smaller(tenant_caps.max_output_tokens, lane_caps.max_output_tokens),
            smaller(tenant_caps.max_sequence_tokens, lane_caps.max_sequence_tokens),
        )

    @property
    def default_top_k(self) -> int | None:
        """Of a request that names none: all tokens would be over the cap."""
        return None if self.top_k is None else self.top_k.value

    def default_max_tokens(self, num_prompt_tokens: int, at_most: int) -> int:
        """Of a request that names none, whose prompt fits."""
        bounds = [at_most]
        if self.output_tokens is not None:
            bounds.append(self.output_tokens.value)
        if self.sequence_tokens is not None:
            bounds.append(self.sequence_tokens.value - num_prompt_tokens)
        return min(bounds)


NO_CAPS_IN_FORCE = CapsInForce()


def check_caps(client_request: ClientRequest, caps: CapsInForce, max_context_tokens: int) -> None:
    """Raises InvalidRequest with every field over its cap, as far as that is known before the prompt is tokenized."""
    options, names, found = client_request.options, client_request.names, []
    num_choices, top_k = options.n or 1, options.top_k
    if caps.n is not None and num_choices > caps.n.value:
        found.append(FieldViolation(names["n"], f"is {num_choices}; {caps.n.described}"))
    if caps.top_k is not None and top_k is not None and not 1 <= top_k <= caps.top_k.value:
        all_tokens = ", which is all tokens" if top_k == 0 else ""
        found.append(FieldViolation(names["top_k"], f"is {top_k}{all_tokens}; {caps.top_k.described}"))
    if caps.output_tokens is not None:
        for name in ("max_tokens", "min_tokens"):
            value = getattr(options, name)
            if value is not None and value > caps.output_tokens.value:
                found.append(FieldViolation(names[name], f"is {value}; {caps.output_tokens.described}"))
    if not any(violation.field == names["max_tokens"] for violation in found):
        is_ids = isinstance(client_request.prompt, TokenIds)
        num_prompt = len(client_request.prompt.ids) if isinstance(client_request.prompt, TokenIds) else 1
        prompt_field = names["token_ids"] if is_ids else ""
        found += find_too_long(client_request, caps, prompt_field, num_prompt, max_context_tokens, is_least=not is_ids)
    if found:
        raise InvalidRequest(found)


def find_too_long(
    client_request: ClientRequest,
    caps: CapsInForce,
    prompt_field: str,
    num_prompt_tokens: int,
    max_context_tokens: int,
    *,
    is_least: bool = False,
) -> list[FieldViolation]:
    """Prompt and output together. `is_least`: the prompt is not counted yet, and has at least so many tokens."""
    cap, max_tokens = caps.sequence_tokens, client_request.options.max_tokens
    if cap is None:
        return []
    if num_prompt_tokens >= cap.value and prompt_field:
        problem = f"is {num_prompt_tokens} tokens; {cap.described} of prompt and output, one of them of output"
        return [FieldViolation(prompt_field, problem)]
    if max_tokens is not None and min(num_prompt_tokens + max_tokens, max_context_tokens) > cap.value:
        prompt = "a prompt of any length" if is_least else f"a prompt of {num_prompt_tokens} tokens"
        problem = f"is {max_tokens}, with {prompt}; {cap.described} tokens of prompt and output together"
        return [FieldViolation(client_request.names["max_tokens"], problem)]
    return []
