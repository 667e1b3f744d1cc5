"""The words that every other room uses: the life of a request, sampling parameters, errors, the clock.

Standard library alone, but for `cost_fit` (numpy) and `trace_context` (OpenTelemetry); no I/O but in `process`, which
reads /proc, and no asyncio but in `tasks`.
"""
