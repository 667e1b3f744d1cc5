"""Who is let in: by what waits already, as the scheduler reports it, before anything is done for the request."""
