"""Load over HTTP on a stack that runs, or on another server beside it, and what its clients see."""
