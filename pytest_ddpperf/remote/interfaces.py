"""The network interfaces and addresses of this node."""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

from pytest_ddpperf.wire import boot

_GET_ADDRESS = 0x8915  # SIOCGIFADDR, Linux
_IPV6 = Path("/proc/net/if_inet6")
_CLASS = Path("/sys/class/net")


def interface_of(address: str) -> str:
    """Return the name of the interface that has this address; "" if the system does not say."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        for line in boot.contents(_IPV6).splitlines():
            found, *_, name = line.split()
            if ipaddress.ip_address(bytes.fromhex(found)) == wanted:
                return name
        return ""
    for name, address_of_it in _ipv4():
        if address_of_it == wanted:
            return name
    # An address of an alias, or of a network that is an interface's as a whole: 127.0.1.1 is lo's.
    return "lo" if wanted.is_loopback else ""


def _ipv4() -> list[tuple[str, ipaddress.IPv4Address]]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                reported = fcntl.ioctl(
                    asking.fileno(),
                    _GET_ADDRESS,
                    struct.pack("256s", name.encode()[:15]),
                )
                found.append((name, ipaddress.IPv4Address(reported[20:24])))
    return found


def link_of(name: str) -> str:
    """What kind of link an interface is, and its rate, if the system says so: "ethernet 25000
    Mb/s"."""
    folder = _CLASS / name
    kind = {"1": "ethernet", "32": "infiniband", "772": "loopback"}.get(
        boot.contents(folder / "type"), ""
    )
    # "" of a link that is down, or virtual
    rate = boot.contents(folder / "speed")
    return (
        f"{kind} {rate} Mb/s".strip()
        if rate.isdigit() and rate != "0"
        else kind
    )


def address_of(name: str) -> str:
    """An address of this node by its name: one that others reach, if there is one. Raises
    OSError."""
    found = [
        str(where[0])
        for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ]
    abroad = [
        address
        for address in found
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ]
    if abroad or name in (found[0], "localhost"):
        return (abroad or found)[0]
    # A name that is this host's own for itself (Debian's 127.0.1.1): the address that it is known
    # by outside.
    with (
        suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
    ):
        # nothing is sent; of a network that there is not (RFC 5737)
        asking.connect(("192.0.2.1", 9))
        return str(asking.getsockname()[0])
    return found[0]
