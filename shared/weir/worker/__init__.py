"""The asyncio shell that both worker kinds share: streams of gateways, the arena, the registry, around an engine.

Everything that waits is here; everything that decides about a step is in `weir.engine`.
"""
