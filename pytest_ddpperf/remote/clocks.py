"""Both ends of the exchange that shows by how much the clocks of two nodes differ."""

import socket
import struct
import time
from collections.abc import Sequence

_LONGEST_SECONDS = 12.0  # for one answer
# The bounds come from the luckiest of so many.
_EXCHANGES = 200
_CLOCK = struct.Struct("!q")


def compare_clocks(connected: socket.socket) -> float:
    """Return by how many nanoseconds the clock at the other end, which sends its time
    (`send_clock`), is ahead. Raises OSError."""
    connected.setblocking(False)
    return closest([_exchange(connected) for _ in range(_EXCHANGES)])


def closest(exchanges: Sequence[tuple[int, int, int]]) -> float:
    """Return the middle of what exchanges leave open together. Each is (ours before, theirs, ours
    after) in nanoseconds: theirs was read between the two."""
    low = max(theirs - after for _, theirs, after in exchanges)
    high = min(theirs - before for before, theirs, _ in exchanges)
    return (low + high) / 2


def send_clock(connected: socket.socket) -> None:
    """Send the time for each byte that comes. Nothing else may happen in between: each answer takes
    as long as it is late. Raises OSError."""
    connected.setblocking(False)
    for _ in range(_EXCHANGES):
        _spin(connected, 1)
        connected.send(_CLOCK.pack(time.monotonic_ns()))
    connected.setblocking(True)


def _exchange(connected: socket.socket) -> tuple[int, int, int]:
    before = time.monotonic_ns()
    connected.send(b"?")
    reported = _spin(connected, _CLOCK.size)
    after = time.monotonic_ns()
    return before, int(_CLOCK.unpack(reported)[0]), after


def _spin(connected: socket.socket, size: int) -> bytes:
    """Return so many bytes of a socket that does not block. Who sleeps until they come takes
    several times as long to see them. Raises OSError."""
    received, until = b"", time.monotonic() + _LONGEST_SECONDS
    while len(received) < size:
        try:
            part = connected.recv(size - len(received))
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError from None
            continue
        if not part:
            raise ConnectionError
        received += part
    return received
