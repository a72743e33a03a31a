"""The HTTP edge. It talks to the engine only through messages."""
