"""Messages between edge and engine, and sessions as documents and files."""
