"""The scheduler's heap is the one that policies use."""

from weir.core.heaps import KeyT, LazyHeap

__all__ = ["KeyT", "LazyHeap"]
