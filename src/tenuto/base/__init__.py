"""What every layer may know: errors, checks, configuration, clock, plans. Plain Python and NumPy."""
