"""Requests of a worker as gateways see them: streams in, tokens out, spans."""
