"""Which running sequences should go on at another decode worker: so that none is crowded while others idle, and so that
a large request finds its memory in one place."""
