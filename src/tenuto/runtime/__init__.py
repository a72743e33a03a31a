"""Running engines: loads a model by name and runs an engine that answers messages, in this process or another."""
