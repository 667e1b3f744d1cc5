"""Quotas as response headers, by the names that OpenAI's and Anthropic's clients read."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from weir_gateway.frontends.error_forms import MESSAGES_PATH
from weir_gateway.requests.quota_book import Allowance, Quota

_OPENAI_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})

_ROUNDING = 1e-6


def rate_limit_headers(path: str, quota: Quota, unix_time_s: Callable[[], float]) -> dict[str, str]:
    """None at paths that cost nothing of a quota."""
    kinds = [(name, allowance) for name, allowance in quota._asdict().items() if allowance is not None]
    headers: dict[str, str] = {}
    for name, allowance in kinds:
        if path in _OPENAI_PATHS:
            headers |= _openai(name, allowance)
        elif path == MESSAGES_PATH:
            headers |= _anthropic(name, allowance, unix_time_s())
    return headers


def duration_text(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 8.64s, 6m0s, 1h0m2s. Rounded up to milliseconds."""
    total_ms = math.ceil(seconds * 1000 - 1e-6)
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    hours, minutes_left = divmod(minutes, 60)
    head = f"{hours}h{minutes_left}m" if hours else f"{minutes}m" if minutes else ""
    return f"{head}{rest_ms / 1000:.10g}s"


def _openai(name: str, allowance: Allowance) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": f"{math.floor(allowance.per_min)}",
        f"x-ratelimit-remaining-{name}": f"{math.floor(allowance.left + _ROUNDING)}",
        f"x-ratelimit-reset-{name}": duration_text(allowance.full_in_s),
    }


def _anthropic(name: str, allowance: Allowance, now_unix_s: float) -> dict[str, str]:
    full_at = datetime.fromtimestamp(now_unix_s, UTC) + timedelta(seconds=allowance.full_in_s)
    return {
        f"anthropic-ratelimit-{name}-limit": f"{math.floor(allowance.per_min)}",
        f"anthropic-ratelimit-{name}-remaining": f"{math.floor(allowance.left + _ROUNDING)}",
        f"anthropic-ratelimit-{name}-reset": full_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
