"""What operators see of the whole stack at a gateway: a snapshot of it, pushed while somebody watches, and the page
that shows it. At rest nothing is done for it."""
