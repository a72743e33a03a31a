"""The Anthropic-compatible interface: messages and their token counts."""
