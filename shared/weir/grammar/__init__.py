"""Keeps a sequence inside a grammar: compiles sources against a vocabulary, and says at each token which ones may come
next. Pure but for one thread that computes masks beside the step. An engine behind `protocol` does the work.
"""
