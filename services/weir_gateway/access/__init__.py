"""Who may ask for what: callers by their keys, and the rules as the scheduler writes them."""
