"""Pools, leases, tables, checkpoints and their audit: who owns every unit of model state. No tensors."""
