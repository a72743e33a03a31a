"""Scripts that run in a client's own environment. Each takes the server's URL and fails unless the client works."""
