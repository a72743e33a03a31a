"""The command `tenuto top`: the map of a server in a terminal."""
