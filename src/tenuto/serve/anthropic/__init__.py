"""The interface of Anthropic's clients."""
