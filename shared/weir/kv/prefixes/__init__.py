"""Cached prefixes: content hashes of full pages, and the index that finds, pins and evicts them."""
