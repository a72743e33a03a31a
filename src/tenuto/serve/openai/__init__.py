"""The interface in OpenAI's manner: models, completions and chat completions."""
