"""Kernels: in PyTorch, portable and the reference for tests, and natively for CPUs."""
