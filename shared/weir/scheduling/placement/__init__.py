"""Where a request runs: what it costs there, and whether it fits into memory until its end."""
