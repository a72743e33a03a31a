"""Tools: declarations of functions, calls found in answers, and grammars that force them."""
