"""Runs published, unmodified clients against a server."""
