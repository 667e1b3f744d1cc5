"""Pages of a worker: acquired from the arena, given back, shared as prefixes, taken over with handed-off sequences."""
