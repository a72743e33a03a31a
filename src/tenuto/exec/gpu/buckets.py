"""The sizes of captured steps."""


def bucket_of(rows: int) -> int:
    """Returns the number of rows of the captured step that computes `rows`: a power of two, or a multiple of 16."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16
