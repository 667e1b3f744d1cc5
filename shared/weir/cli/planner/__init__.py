"""`weir planner`: looks at a running stack every few seconds, and says how many workers of each role it should have.

The planner itself is `weir.planner`; here is what it sees, by the gateways' pages of metrics, and what is done then.
"""
