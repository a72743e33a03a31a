"""Families of models: what their files say, as our configuration and under our names."""
