"""Sessions and turns: their states, their history, and who may do what when."""
