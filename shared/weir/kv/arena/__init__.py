"""The arena of a host: one segment of memory with its pages, and who owns each of them."""
