"""Files that are written whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def write(path: Path, text: str, *, append: bool = False) -> None:
    """Write `text` as UTF-8 in place of the content of `path`, or after it; make its folder if
    there is none.

    Raises OSError, and then the file is as it was. A link stays one; a pipe is written to as it is.
    """
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if append or (path.exists() and not path.is_file()):
        with open(path, "ab") as file:
            file.write(data)
    else:
        _replace(Path(os.path.realpath(path)), data)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{uuid4().hex}.tmp")  # on the same file system
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        # gone after a replacement; else the first error counts
        with suppress(OSError):
            temporary.unlink()
