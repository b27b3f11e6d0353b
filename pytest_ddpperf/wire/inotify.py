"""Which of some files any process of this machine opens, in whichever language it is written, by
inotify(7) of Linux. Standard library only."""

import ctypes
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# of <sys/inotify.h>: opened, modified, other metadata, moved, removed
_ANY_USE = 0x20 | 0x2 | 0x4 | 0x800 | 0x400
_OVERFLOW = 0x4000  # events were lost
# the watch, what happened, and two more; no name follows, for these are files
_EVENT = struct.Struct("iIII")
_EVENTS_BYTES = 256 * _EVENT.size


class FilesWatch:
    """Watches files from its making on, until `close`; each has a name, which several may share."""

    def __init__(self, files: Mapping[Path, str]) -> None:
        """Raises OSError if the system cannot say."""
        self._library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "inotify_init1"):
            raise OSError("this system has no inotify")
        self._names: dict[int, str] = {}
        self._events = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        try:
            self.add(files)
        except OSError:
            self.close()
            raise

    def add(self, files: Mapping[Path, str]) -> None:
        """Watch these files from now on, those anew that were replaced; raises OSError."""
        for file, name in files.items():
            watch = self._library.inotify_add_watch(
                self._events, os.fsencode(file), _ANY_USE
            )
            if watch < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")
            self._names[watch] = name

    def used(self) -> set[str]:
        """Return the names of files that were opened, or changed, since this was last asked, or
        since the watch was made."""
        found: set[str] = set()
        with suppress(BlockingIOError):
            while events := os.read(self._events, _EVENTS_BYTES):
                for watch, happened, _, _ in _EVENT.iter_unpack(events):
                    if happened & _OVERFLOW:
                        found.update(self._names.values())
                    elif watch in self._names:
                        found.add(self._names[watch])
        return found

    def close(self) -> None:
        os.close(self._events)
