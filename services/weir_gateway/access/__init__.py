"""Who may ask for what: callers by their keys, and the rules that the scheduler publishes."""
