"""Streams to the workers, and their messages."""
