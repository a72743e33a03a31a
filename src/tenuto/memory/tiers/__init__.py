"""Tiers: copies of units in host memory and on disk."""
