"""What every layer may know: errors, configuration, clock, ids, plans. Plain Python and NumPy."""
