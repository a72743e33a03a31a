"""Translates models to lists of operations that the native kernels execute."""
