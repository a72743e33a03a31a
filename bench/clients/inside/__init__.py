"""What runs in a client's own environment: each is given the server's URL, and fails unless it gets what it wants."""
