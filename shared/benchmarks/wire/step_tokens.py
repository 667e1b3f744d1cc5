"""Tokens that say in which step they were made, so that whoever receives one knows how old it is."""

_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 1000, 30_000
_STRIDE = 7919
"""Prime to the number of ids: texts of a stream differ, and each id is that of one step in 30,000."""
_INVERSE = pow(_STRIDE, -1, _NUM_TOKEN_IDS)


def token_of_step(step: int) -> int:
    return _FIRST_TOKEN_ID + _STRIDE * step % _NUM_TOKEN_IDS


def age_s(token_id: int, step_s: float, now_s: float) -> float:
    """Since the step of that token was due, at `now_s` of the monotonic clock; right from one step before to 29,998
    after."""
    latest = int(now_s / step_s) + 1  # a worker's step may begin a little before it is due: an age below 0
    step = latest - (latest - (token_id - _FIRST_TOKEN_ID) * _INVERSE) % _NUM_TOKEN_IDS
    return now_s - step * step_s
