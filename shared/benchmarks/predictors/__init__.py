"""How well output lengths are ranked from prompts alone: what predictors are chosen by.

`kept` has what is read again: the lengths of the built-in model's answers, and, for the experiments that charge what a
prediction costs, predictors.json of the run whose predictors.md lies in `shared/docs/results`.
"""
