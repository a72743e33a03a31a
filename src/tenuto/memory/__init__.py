"""Memory bookkeeping without tensors: pools, leases, page tables, checkpoints, tiers, and the audit of every unit."""
