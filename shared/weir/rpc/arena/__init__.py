"""The worker's side of the arena: a lease, what it holds, and the calls that pages change hands by."""
