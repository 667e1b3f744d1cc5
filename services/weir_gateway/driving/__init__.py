"""A request on its way: submitted, granted, started, streamed, closed."""
