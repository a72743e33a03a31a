"""The Ollama-compatible interface: chats, completions, embeddings, and descriptions of models."""
