"""The gateway service: the only thing that clients see, by gRPC and by OpenAI's HTTP API.

It drives each request from its arrival to its one terminal event, and holds its prompt and its tokens meanwhile.
"""
