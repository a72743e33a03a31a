"""The thread that runs an engine: it executes commands and reports acknowledged changes."""
