"""The network interface that has an address."""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR, Linux
_IPV6 = Path("/proc/net/if_inet6")
_CLASS = Path("/sys/class/net")


def interface_of(address: str) -> str:
    """Its name; "" where the system does not tell."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with suppress(OSError):
            for line in _IPV6.read_text().splitlines():
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
    with suppress(ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                told = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append((name, ipaddress.IPv4Address(told[20:24])))
    return found


def link_of(name: str) -> str:
    """What kind of link an interface is, and its rate, as far as the system tells: "ethernet 25000 Mb/s"."""
    folder = _CLASS / name
    kind = {"1": "ethernet", "32": "infiniband", "772": "loopback"}.get(_read(folder / "type"), "")
    rate = _read(folder / "speed")
    return f"{kind} {rate} Mb/s".strip() if rate.isdigit() and rate != "0" else kind


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # of a link that is down, or virtual
        return ""
