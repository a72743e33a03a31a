"""What all interfaces share: open turns, samples, streams, errors, limits and settings."""
