"""One module an experiment, its name the experiment's; each has one `EXPERIMENT`.

Run `python -m benchmarks.sim --list` for what there is.
"""
