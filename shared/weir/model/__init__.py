"""The model: where its files are, what they say, and the forward pass that turns a step's plan into tokens.

Importing `source`, `config`, `tokenizer`, `chat_template`, `pull` or `digest` never imports torch; only workers and the
bench import the others.
"""
