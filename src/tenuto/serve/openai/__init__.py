"""The OpenAI-compatible interface: models, completions, chat completions, responses, conversations and tokens."""
