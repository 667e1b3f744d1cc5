"""`weir bench …`: what whoever has installed Weir measures with it, from the step of a worker to a server over HTTP.

Figures are printed beside the machine's own limits and never asserted.
"""
