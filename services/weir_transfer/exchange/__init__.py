"""Pages that pass between this host's arena and those of other hosts: what is offered, and what is fetched.

The arena's books of them are `weir_transfer.remote_prefixes`."""
