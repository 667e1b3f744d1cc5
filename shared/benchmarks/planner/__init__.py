"""What the planner is worth: loads replayed in simulation on workers that start late, drain and switch roles, under the
planner, simple rules, fixed numbers, and an oracle that knows the future.
"""
