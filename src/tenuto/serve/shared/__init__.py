"""Code shared by all interfaces: open turns, samples, streams, errors, limits and settings."""
