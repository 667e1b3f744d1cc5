"""Weir: a server for large language models with separate prefill and decode pools.

This package is the library that all services share; it never imports a service.
"""

__version__ = "0.1.0"
