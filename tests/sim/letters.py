"""What the tokens of the simulator stand for."""

VOCAB = 13
EOS = 0
TOKEN_BYTES = (b"a", b"b", b"ab", b"c", b"\xc3", b"\xa9", b"", b"bca", b"\xe2\x82", b"\xac", b"cc", b" ", b"b\xc3")
"""Letters that make up stop strings, nothing, and parts of characters."""
