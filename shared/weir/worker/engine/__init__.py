"""The engine of a worker: its model, its thread, its share of the machine."""
