"""Where full pages rest outside the arena, and come back from by their hash. Whose they are only the arena says."""
