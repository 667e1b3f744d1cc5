"""The simulator beside a stack on this machine: how far its latencies and its throughput are from real ones."""
