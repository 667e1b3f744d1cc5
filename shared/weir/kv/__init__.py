"""Pages and who owns them: the arena's segment, its ownership table, prefixes, sequence records, page memory.

The transfer service is the only writer of the ownership table; a worker writes only pages and records that it owns.
"""
