"""Text to token ids and back: tokenizers, chat templates, and the bytes of each token."""
