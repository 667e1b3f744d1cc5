"""A simulated system: gateway, scheduler, and the fleet of workers."""
