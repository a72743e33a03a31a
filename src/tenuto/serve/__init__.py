"""The HTTP edge. It knows the engine only through messages."""
