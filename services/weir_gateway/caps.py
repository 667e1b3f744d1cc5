"""What a request may ask for where its tenant or its lane caps it: the smaller of both, with whose it is."""

from dataclasses import dataclass

from weir.core.caps import RequestCaps


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
