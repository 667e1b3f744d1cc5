"""OpenAI's chat completions and completions: their bodies, the fields that are not served, and their answers.

What other modules of the port share with them (names of fields, error bodies) lies here too."""
