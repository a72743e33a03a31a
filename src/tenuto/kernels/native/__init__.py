"""The forward pass on a CPU, in C++: compiled on the user's machine when it is first used."""
