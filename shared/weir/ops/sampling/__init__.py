"""Samples one token a row: greedily, or by inverting the cumulative distribution at a number made on the host."""
