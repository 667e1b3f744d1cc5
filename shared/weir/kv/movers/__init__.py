"""How the bytes of pages come to where their next owner reads them: by a change of owner within one memory, in a stream
between two. A mover moves bytes; who owns pages is decided by the transfer services at its ends.
"""
