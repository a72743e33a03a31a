"""Model families: each translates its files' settings and tensor names to ours."""
