"""Checks and measurements of what computes on a GPU; `python -m bench.gpu` runs them."""
