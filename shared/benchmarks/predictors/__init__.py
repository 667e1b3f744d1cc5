"""How well output lengths are ranked from prompts alone: what predictors are chosen by.

`kept` has what is read again, copied there by hand:

answers_smollm2-135m.json   a file of `--generate`: the lengths of the built-in model's answers
predictors.json             what `python -m benchmarks.predictors` wrote beside shared/docs/results/predictors.md;
                            experiments charge what a prediction costs by it
probes.json                 of the parts that shared/docs/results/probes-in-parts.md tells of, the time in which a state
                            is read alone; that of a whole `benchmarks.predictors.probe report` can take its place
"""
