"""Clients as they are published, unmodified, on a server."""
