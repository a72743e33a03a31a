"""Translates models to operations of the native kernels."""
