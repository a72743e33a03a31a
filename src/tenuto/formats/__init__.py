"""Readers of file formats that several packages share; they need no torch and do not interpret the contents."""
