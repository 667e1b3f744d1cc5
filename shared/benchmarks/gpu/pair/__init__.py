"""A prefill and a decode process on one device, whose pages change owner and do not move."""
