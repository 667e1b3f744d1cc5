"""One module an experiment, its name the experiment's; each has one `EXPERIMENT`.

Run `weir bench sim --list` for what there is.
"""
