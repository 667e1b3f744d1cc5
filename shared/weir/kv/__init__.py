"""Pages and who owns them: page arithmetic, the arena's segment, its ownership table, sequence records, the client.

The transfer service is the only writer of the ownership table; a worker writes only pages and records that it owns.
"""
