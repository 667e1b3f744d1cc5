"""What each kind of worker does differently, and the table of kinds that a worker process chooses from."""
