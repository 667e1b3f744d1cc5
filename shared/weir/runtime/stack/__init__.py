"""A stack of processes on one machine: planned, started, supervised, found again and ended."""
