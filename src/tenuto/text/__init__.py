"""Text on both sides of the model: tokenizers, chat templates, incremental decoding, stop strings.

`load_tokenizer` (load.py) reads a `Tokenizer` from a Hugging Face directory or a GGUF file. `ChatTemplate` (chat.py)
turns messages into the tokens a session appends. `IncrementalDecoder` (decoder.py) and `StopMatcher` (stops.py) turn
sampled tokens into the text a client receives. The package does not depend on sessions, memory or models.
"""
