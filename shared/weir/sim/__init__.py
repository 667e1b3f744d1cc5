"""The simulator: discrete events around the scheduler core, batchers and prefix code that Weir runs in earnest.

Time comes from a cost model instead of a machine, requests from a trace or a random source, and a seed fixes the rest.
"""
