"""Other people's clients against a running stack: what each of them makes of Weir's answers and refusals."""
