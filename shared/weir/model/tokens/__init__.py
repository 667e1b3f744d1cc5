"""Text to token ids and back: tokenizers, chat templates, and what each token spells."""
