"""Columns: runs of unsigned 32-bit integers, or of 32-bit floats, as little-endian bytes.

Token ids, block ids and everything else that is hot travels as one byte string a column instead of one MessagePack
integer an item: a 4,096-token prompt decodes as a single copy.
"""

import sys
from array import array
from collections.abc import Iterable

_BIG_ENDIAN = sys.byteorder == "big"
ITEM_BYTES = 4


def pack(values: Iterable[int]) -> bytes:
    """Pack integers into a column. Raises OverflowError when a value is outside 0..2**32-1."""
    column = array("I", values)
    if _BIG_ENDIAN:
        column.byteswap()
    return column.tobytes()


def unpack(column: bytes) -> list[int]:
    """Unpack a column. Raises ValueError when its length is not a multiple of four bytes."""
    values = array("I")
    values.frombytes(column)
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack numbers into a column of floats, rounded to 32 bits."""
    column = array("f", values)
    if _BIG_ENDIAN:
        column.byteswap()
    return column.tobytes()


def unpack_floats(column: bytes) -> list[float]:
    """Unpack a column of floats. Raises ValueError when its length is not a multiple of four bytes."""
    values = array("f")
    values.frombytes(column)
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tolist()


def count(column: bytes) -> int:
    """Number of integers in a column. Raises ValueError when its length is not a multiple of four bytes."""
    if len(column) % ITEM_BYTES:
        raise ValueError(f"a column of {len(column)} bytes does not hold whole 32-bit integers")
    return len(column) // ITEM_BYTES
