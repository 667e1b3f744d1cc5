"""What a token costs on its way from a worker to its client: processor time of every process beside the workers."""
