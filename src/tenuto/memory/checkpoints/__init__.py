"""Checkpoints: resumable positions of sequences, their cache, and which to give up first."""
