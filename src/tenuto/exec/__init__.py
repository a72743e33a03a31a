"""Executors: what carries out the plans of the engine."""
