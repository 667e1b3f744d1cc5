"""How the bytes of pages come to where their next owner reads them: one small interface, one contract test over all.

A mover moves bytes only; who owns the pages is decided by the transfer service, after `move` has returned.
"""
