"""Model files and forward passes: where weights come from, how they are read, what is computed with them."""
