"""What a simulated run came to: latencies, attainment, fairness; tables and plots."""
