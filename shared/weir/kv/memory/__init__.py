"""Page memory that outlives the process that made it: of the host, of a GPU, and the swap file."""
