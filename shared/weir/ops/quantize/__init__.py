"""Rows of activations as 8-bit integers with one scale for each group of 32.

A row's bits depend on that row alone.
"""
