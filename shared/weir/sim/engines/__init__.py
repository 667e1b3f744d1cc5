"""Engines of simulated workers: the real batchers over modelled steps, and fast ones equal to them."""
