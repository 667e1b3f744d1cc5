"""Kernels kept on disk are found again only while everything that they were compiled from is the same."""

import weir.model.cpu.forward
import weir.model.cpu.workspace
import weir.ops.simd.integer
from weir.ops.simd.jit import kernel_sources


def test_the_name_of_the_cache_depends_on_the_forward_pass_and_what_it_is_made_of() -> None:
    sources = {str(path) for path in kernel_sources()}
    modules = (weir.model.cpu.forward, weir.model.cpu.workspace, weir.ops.simd.integer)
    assert {module.__file__ for module in modules} <= sources
