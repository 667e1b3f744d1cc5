"""OpenAI's files and batches over HTTP, and the answers to lines of batches, which are those of its other routes."""
