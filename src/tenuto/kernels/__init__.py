"""Portable PyTorch kernels: paged attention and sampling. The reference that faster ones are held against."""
