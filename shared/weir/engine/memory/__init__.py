"""The pages of an engine's sequences: taken, shared, swapped out and given back."""
