"""Running engines: from a model's name to an engine that answers messages, in this process or in one of its own."""
