"""The interface of llama.cpp's server, as far as it is not OpenAI's."""
