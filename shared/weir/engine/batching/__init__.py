"""Which sequences a step computes, and how much of each: one batcher a role, and the rules of joining."""
