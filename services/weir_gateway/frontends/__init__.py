"""What clients speak to: gRPC, and OpenAI's HTTP API."""
