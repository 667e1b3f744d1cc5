"""Pages of a worker: taken from the arena, given back, shared as prefixes, read when handed off."""
