"""Executors: they carry out the engine's plans."""
