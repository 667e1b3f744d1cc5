"""Copies whole pages between an arena and one contiguous buffer, for transfer and for swapping."""
