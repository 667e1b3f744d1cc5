"""The workers as placement sees them: pools, capacity, open slots, cached prefixes."""
