"""Batch jobs: files of requests that are answered when there is room, and their answers as files. What a line and a batch
are is pure; the store holds them in a database, and the runner answers lines through the gateway's own pipeline."""
