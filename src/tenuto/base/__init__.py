"""Errors, checks, configuration, clocks, plans and messages, which every layer may use. Plain Python and NumPy."""
