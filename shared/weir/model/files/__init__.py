"""A model's files: where they are, what their headers say, and their tensors by name. numpy only."""
