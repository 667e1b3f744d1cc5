"""Commands that start and end stacks, and hosts of stacks. What they start is planned and supervised in
`weir.runtime.stack`."""
