"""Comparison of Tenuto with the best other servers, on this machine and in one run."""
