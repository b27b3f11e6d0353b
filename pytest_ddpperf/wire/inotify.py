"""Which of some files any process of this machine opens, in whichever language it is written, by
inotify(7) of Linux. Standard library only."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress

# of <sys/inotify.h>: opened, modified, other metadata, moved, removed
_ANY_USE = 0x20 | 0x2 | 0x4 | 0x800 | 0x400
_OVERFLOW = 0x4000  # events were lost
_EVENT = struct.Struct(
    "iIII"
)  # the watch, what happened, two more; without a name for a file
_EVENTS_BYTES = 256 * _EVENT.size


class FilesWatch:
    """Watches files from its making on, until `close`."""

    def __init__(self, files: Iterable[str | os.PathLike[str]]) -> None:
        """Raises OSError if the system cannot say."""
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "inotify_init1"):
            raise OSError("this system has no inotify")
        self._files: dict[int, str] = {}
        self._events = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        for file in files:
            name = os.fsencode(file)
            watch = library.inotify_add_watch(self._events, name, _ANY_USE)
            if watch < 0:
                self.close()
                raise OSError(ctypes.get_errno(), "inotify_add_watch")
            self._files[watch] = os.fsdecode(file)

    def used(self) -> set[str]:
        """Return the files that were opened, or changed, since this was last asked, or since the
        watch was made."""
        found: set[str] = set()
        with suppress(BlockingIOError):
            while events := os.read(self._events, _EVENTS_BYTES):
                for watch, happened, _, _ in _EVENT.iter_unpack(events):
                    if happened & _OVERFLOW:
                        found.update(self._files.values())
                    elif watch in self._files:
                        found.add(self._files[watch])
        return found

    def close(self) -> None:
        os.close(self._events)
