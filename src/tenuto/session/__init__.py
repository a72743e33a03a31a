"""Sessions and turns: their states, their history, and the operations that each state allows."""
