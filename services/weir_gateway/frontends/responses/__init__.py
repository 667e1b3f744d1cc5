"""OpenAI's Responses API: an adapter of its bodies and events to the gateway's requests and deltas, and the store of
answers that a later request goes on from.
"""
