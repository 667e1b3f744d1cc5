"""What is asked of a simulated system: traces, arrival times, lengths."""
