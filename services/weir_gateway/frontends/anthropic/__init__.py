"""Anthropic's Messages API: an adapter of its bodies and events to the gateway's requests and deltas."""
