"""Steps of a model with no server around them: how fast they are, and what they cost."""
