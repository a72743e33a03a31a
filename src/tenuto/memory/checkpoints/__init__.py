"""Checkpoints: resumable positions of sequences, their cache, and the order of eviction."""
