"""Simulated page memory, and what is cached in it."""
