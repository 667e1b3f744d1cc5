"""What drives a request: submitted, granted, started, streamed, closed."""
