"""Benchmarks and experiments that are made in a checkout of Weir, beside the package and not part of its wheel.

What whoever has installed Weir measures is in `weir.bench` (`weir bench …`); `weir` never imports this. Results that
are kept lie in `shared/docs/results`, with an overview in `shared/docs/RESULTS.md`.
"""
