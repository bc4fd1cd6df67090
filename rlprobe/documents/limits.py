"""What a document may be, whatever its format."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

#: Levels of lists and mappings. An alignment has 4, a manifest 6.
MAX_DEPTH = 64
#: Digits of a whole number; 2**128 has 39. Longer ones cost the square of their length to read.
MAX_DIGITS = 40


_BLOCK = 1 << 20
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: What a file is that begins with one of them.
UTF_16 = "UTF-16, which some editors and shells make of a file; convert it to UTF-8"


class DocumentError(ValueError):
    """A document is not of its format, or goes beyond a limit; the message says where."""


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """A file's content, of which never more than ``most`` bytes are read, whatever its kind.

    Raises:
        DocumentError: it is missing, may not be read or is larger.
    """
    try:
        with Path(path).open("rb") as file:
            # read(n) takes n bytes of memory at once; a pipe or a device has no size
            data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
            while len(data) <= most and (block := file.read(_BLOCK)):
                data += block
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror or error}") from error
    if len(data) > most:
        raise DocumentError(f"is larger than {most} bytes, the most that is read of such a file")
    return data


def decoded(data: bytes) -> str:
    """The text of UTF-8 bytes, without a byte order mark.

    Raises:
        DocumentError: naming the first byte that is no UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data.startswith(UTF_16_MARKS):
            raise DocumentError(f"is {UTF_16}") from error
        raise DocumentError(
            f"byte {error.start}: not JSON or YAML: {data[error.start]:#04x} is no UTF-8 text"
        ) from error


def check_characters(text: str) -> None:
    r"""Refuse what only escapes such as ``"\ud800"`` can put into a text, and no file can hold.

    Raises:
        DocumentError: half of a surrogate pair stands in it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"character U+{ord(text[error.start]):04X} is half of a pair, which is no text"
        ) from error
