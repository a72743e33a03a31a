"""The forward pass on a GPU: kernels of our own, and graphs of decode steps that run without the host."""
