"""Gather and scatter of whole pages, in 8-byte words."""

import triton
import triton.language as tl


@triton.jit
def page_copy_kernel(
    p_source,
    p_target,
    p_page_ids,
    stride_source,
    stride_target,
    num_words,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (item, block of words): target[item] = source[page_ids[item]], or the other way round for a scatter."""
    i_item = tl.program_id(0).to(tl.int64)
    i_page = tl.load(p_page_ids + i_item).to(tl.int64)
    if GATHER:
        p_from = p_source + i_page * stride_source
        p_to = p_target + i_item * stride_target
    else:
        p_from = p_source + i_item * stride_source
        p_to = p_target + i_page * stride_target
    o_word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < num_words
    tl.store(p_to + o_word, tl.load(p_from + o_word, mask=m_word), mask=m_word)
