"""Kernels: portable ones in PyTorch, which are the reference in tests, and native ones for CPUs."""
