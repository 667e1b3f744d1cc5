"""How many workers of which kind a load needs."""
