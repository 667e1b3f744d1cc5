"""Batch jobs: files of requests that are answered when there is room, and their answers as files. What lines and
batches are is pure; the store has them in a database, and the runner answers lines by the gateway's own pipeline."""
