"""Every figure that a process has, the name that it is exported by, and what it says, a file for each kind of process.

The page metrics.md of the documentation is this table; a test compares them.
"""
