"""Kinds of memory behind one interface: full and sliding attention, recurrent state."""
