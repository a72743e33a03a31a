"""llama.cpp's own interface: the routes and fields that its server has besides OpenAI's."""
