"""What all interfaces share: turns under way, samples, streams, errors, limits and settings."""
