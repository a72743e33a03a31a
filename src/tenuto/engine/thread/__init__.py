"""The thread that runs an engine: commands in, acknowledged changes out."""
