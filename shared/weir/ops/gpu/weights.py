"""Weights of tokens in whole numbers, so that their sums depend on no order of additions.

A weight is e**((logit - highest) / temperature) in fp32, by the operations of `weir.ops.simd.float` in their order, in
units of 2**-44. Sums over a vocabulary are exact in 64 bits; what is more than 30 temperatures below the most likely
token weighs nothing.
"""

import triton
import triton.language as tl

MAX_VOCAB_SIZE = 1 << 18
"""More weights of 2**44 might not fit into 63 bits."""
WEIGHT_UNIT = tl.constexpr(2.0**-44)
_UNITS = tl.constexpr(2.0**44)

_LOWEST = tl.constexpr(-127.0 * 0.6931472)
_LOG2_E = tl.constexpr(1.4426950216293335)
_ROUND_TO_EXPONENT = tl.constexpr(12583039.0)
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.428606765330187e-06)
_C2 = tl.constexpr(0.4999999403953552)
_C3 = tl.constexpr(0.1666642129421234)
_C4 = tl.constexpr(0.041668057441711426)
_C5 = tl.constexpr(0.008374964818358421)
_C6 = tl.constexpr(0.0013842710759490728)


@triton.jit
def exp_of(x):
    """e**x of fp32 x <= 0, as `emit_exp` of `weir.ops.simd.float`; 0 below -87.7."""
    x = tl.maximum(x, _LOWEST)
    # the low bits of this sum are the integer nearest to x / ln 2, plus 127: the exponent field of 2**integer
    biased = x * _LOG2_E + _ROUND_TO_EXPONENT
    integer = biased - _ROUND_TO_EXPONENT
    scale = (biased.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    fraction = tl.fma(integer, -_LN2_HIGH, x)
    fraction = tl.fma(integer, -_LN2_LOW, fraction)
    y = tl.fma(_C6, fraction, _C5)
    y = tl.fma(y, fraction, _C4)
    y = tl.fma(y, fraction, _C3)
    y = tl.fma(y, fraction, _C2)
    y = tl.fma(y, fraction, 1.0)
    y = tl.fma(y, fraction, 1.0)
    return y * scale


@triton.jit
def weight_of(logit, highest, inverse_temperature):
    """In units, int64."""
    return (exp_of((logit - highest) * inverse_temperature) * _UNITS).to(tl.int64)
