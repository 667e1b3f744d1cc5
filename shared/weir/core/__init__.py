"""The words that every other room uses: attempts, the life of a request, sampling parameters, errors, the clock.

Pure: no I/O, no asyncio, no third-party package.
"""
