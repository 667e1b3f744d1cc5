"""Lanes, tenants and every other bound of the scheduler, and the file that sets them."""
