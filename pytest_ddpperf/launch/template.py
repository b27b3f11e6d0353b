"""pytest's handle on the templates that its rank servers are forked from (see `rank.template`)."""

import os
import socket
import sys

from pytest_ddpperf.records.messages import (
    ForkServer,
    ServerEnded,
    StartTemplate,
)
from pytest_ddpperf.records.plan import Variables
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import readable

# Read when a library is imported, so a rank of a template that imported it earlier would not see a
# change.
_READ_AT_IMPORT = tuple(
    "OMP_ GOMP_ MKL_ KMP_ OPENBLAS_ TORCH PYTORCH LD_ PYTHON MALLOC_ GLIBC_".split()
)
# Of these, search paths, which each rank server and each rank has for itself, and folders of
# caches.
_READ_LATER = ("PYTHONPATH", "PREFIX", "_DIR", "_HOME")
# For a template to end its rank servers, and these their ranks.
_END_SECONDS = 10.0


def with_hash_seed(environ: Variables) -> dict[str, str]:
    """Return the variables with the hash seed of all ranks, unless the user chose one, or random
    ones.

    With another seed in each process, the order of sets would be another one on each side of a
    comparison."""
    return {"PYTHONHASHSEED": "0", **environ}


def read_at_import(environ: Variables) -> dict[str, str]:
    """Return the variables whose change needs another template."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and not name.endswith(_READ_LATER)
    }


class Template:
    """One process, from which rank servers are forked."""

    def __init__(self, variables: Variables) -> None:
        """Start it; raises OSError."""
        self._child = boot.Child(
            sys.executable,
            "pytest_ddpperf.rank.template",
            with_hash_seed(variables),
        )
        start = StartTemplate(boot.search_path(), os.getpid())
        self._child.lines.send(start)

    def fork_server(self) -> socket.socket:
        """Return the connection to a new rank server; raises OSError if this process is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._child.lines.send(ForkServer(), theirs.fileno())
        return ours

    @property
    def is_alive(self) -> bool:
        return self._child.process.poll() is None

    def news(self, seconds: float) -> list[ServerEnded]:
        """Return which rank servers have ended since the last call; wait so long for one."""
        if not readable([self._child.lines.socket], seconds):
            return []
        return self._child.lines.receive(ServerEnded) or []

    def output(self) -> str:
        return self._child.output()

    def close(self) -> None:
        """End it, with its rank servers; at once, if it still imports torch."""
        self._child.process.terminate()
        self._child.close(_END_SECONDS)


class Templates:
    """The templates of one pytest, one for a set of variables that libraries read at import: the
    first and the last, since a test may change variables for itself. And a rank server of another
    pytest's template, if that gave one."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}  # by `_key`
        self._given: tuple[str, socket.socket] | None = None

    def add(self, descriptor: int, variables: Variables) -> None:
        """Add the connection to a rank server of another pytest's template."""
        os.set_inheritable(descriptor, False)
        self._given = _key(variables), socket.socket(fileno=descriptor)

    def fork_server(
        self, variables: Variables
    ) -> tuple[socket.socket, Template | None]:
        """Return the connection to a new rank server with these variables, and its template, unless
        that is another pytest's. Raises OSError."""
        wanted, given, self._given = _key(variables), self._given, None
        if given is not None:
            if given[0] == wanted:
                return given[1], None
            given[1].close()
        known = self._templates.get(wanted)
        if known is not None and not known.is_alive:
            # not left to the collector of garbage
            self._templates.pop(wanted).close()
        if wanted not in self._templates:
            # the first one may have forked a rank server for another pytest
            while len(self._templates) > 1:
                self._templates.popitem()[1].close()
            self._templates[wanted] = Template(variables)
        return self._templates[wanted].fork_server(), self._templates[wanted]

    def close(self) -> None:
        """End all templates."""
        while self._templates:
            self._templates.popitem()[1].close()


def _key(variables: Variables) -> str:
    return repr(sorted(read_at_import(with_hash_seed(variables)).items()))
