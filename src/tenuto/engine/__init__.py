"""The engine: admit, plan, submit, settle, audit. One process, one loop."""
