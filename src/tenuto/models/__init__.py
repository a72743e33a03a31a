"""Model files and forward passes: finds and reads weights, and computes with them."""
