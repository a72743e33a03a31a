"""A forward pass whose parts are computed by several processes: tensor parallelism."""
