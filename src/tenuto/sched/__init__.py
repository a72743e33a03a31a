"""Which turns run, how many tokens each, and who yields under pressure."""
