"""A request as a client sent it, checked, and running: its prompt, options, phase, tokens and text."""
