"""Whether any process of this machine opens some files, in whichever language it is written, by
inotify(7) of Linux. Standard library only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress

# of <sys/inotify.h>: opened, modified, other metadata, moved, removed
_ANY_USE = 0x20 | 0x2 | 0x4 | 0x800 | 0x400
_EVENTS_BYTES = 4096


class FilesWatch:
    """Watches files from its making on, until `close`."""

    def __init__(self, files: Iterable[str | os.PathLike[str]]) -> None:
        """Raises OSError if the system cannot say."""
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "inotify_init1"):
            raise OSError("this system has no inotify")
        self._used = False
        self._events = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        for file in files:
            name = os.fsencode(file)
            if library.inotify_add_watch(self._events, name, _ANY_USE) < 0:
                self.close()
                raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def is_used(self) -> bool:
        """Say whether any of the files was opened, or changed, since the watch was made."""
        with suppress(BlockingIOError):
            os.read(self._events, _EVENTS_BYTES)
            self._used = True
        return self._used

    def close(self) -> None:
        os.close(self._events)
