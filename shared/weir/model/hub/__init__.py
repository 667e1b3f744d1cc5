"""Models from the Hugging Face Hub: which files, whether they fit, and how they come; by `weir pull` and `weir up`."""
