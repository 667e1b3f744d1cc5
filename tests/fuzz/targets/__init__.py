"""A file a part of Weir; each has its `TARGETS`."""
