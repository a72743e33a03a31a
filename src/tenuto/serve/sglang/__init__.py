"""The interface in SGLang's manner: its paths, its requests and the form of its answers."""
