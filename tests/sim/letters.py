"""The meanings of the simulator's tokens."""

VOCAB = 13
EOS = 0
TOKEN_BYTES = (b"a", b"b", b"ab", b"c", b"\xc3", b"\xa9", b"", b"bca", b"\xe2\x82", b"\xac", b"cc", b" ", b"b\xc3")
"""Characters that make up stop strings, an empty token, and parts of characters."""
