"""The step of both worker kinds: decide -> run -> record. `decide` is pure, only `run` touches tensors.

Knows no asyncio, gRPC or NATS; a worker's shell feeds it through bounded queues.
"""
