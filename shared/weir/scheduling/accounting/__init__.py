"""What is in the scheduler's care and what it has used: requests, reservations, tenants' service."""
