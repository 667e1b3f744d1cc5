"""TLS: certificates as files that change, and what is made of them: servers' and clients' credentials.

Whom a certificate names, and what he may, is said in `weir.rpc.identities` and `weir.rpc.access`.
"""
