"""Figures of a process, cheap where they are counted, and how they are named and written for Prometheus.

Nothing here knows who counts: gateways, schedulers and workers bring their own.
"""
