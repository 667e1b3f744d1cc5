"""Answers that are held to grammars: whether they keep to them, whoever dies meanwhile, and what that costs a step."""
