"""Which tests a change cannot reach: who opens a file that differs, and whose code imports one."""

from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path

from pytest_ddpperf.wire.inotify import FilesWatch

# The files that the code of a test imports, from the top of the repository; None: not known.
Imports = Callable[[], Set[str] | None]


class Reach:
    """Watches the files that differ, from before the other version's pytest starts until `close`.

    A file that was opened before a test began may be one of the modules of pytest's own process. It
    reaches the test only if the test's code imports it: what ranks run, they open themselves.
    """

    def __init__(self, files: Mapping[Path, str]) -> None:
        """`files`: what has to be opened to use a file that differs, on either side, with that file
        from the top of the repository. Raises OSError if the system cannot say."""
        self._differing = {*files.values()}
        self._watch = FilesWatch(files)
        self._before: set[str] = set()  # opened before the test
        self._in_test: set[str] = set()
        self._is_known = True  # who uses what was opened before

    def collected(self, imported: Collection[str]) -> None:
        """Say that the tests of both sides were collected; modules of this process are
        `imported`."""
        self._before = self._watch.used()
        self._is_known = self._before.issubset(imported)

    def reaches(self, imports: Imports) -> bool:
        """Return False if it is certain that nothing that differs has a part in the test so far."""
        self._in_test |= self._watch.used()
        if self._in_test or not self._is_known:
            return True
        if not self._before:
            return False
        imported = imports()
        return imported is None or not imported.isdisjoint(self._differing)

    def end_test(self, files: Mapping[Path, str]) -> None:
        """Say that a test has ended, on both sides; what it compiled is among the `files` now.
        {} if more may differ. Raises OSError."""
        self._before |= self._in_test | self._watch.used()
        self._in_test.clear()
        self._is_known &= bool(files)
        self._watch.add(files)

    def close(self) -> None:
        self._watch.close()
