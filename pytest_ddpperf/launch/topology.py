"""The class of the links between a run's GPUs, out of `nvidia-smi topo -m`."""

from __future__ import annotations

import re


def interconnect(topology: str, gpus: list[int]) -> str | None:
    """The kinds of links between any two of `gpus` (nvidia-smi's numbers), as "NV18" or "NV2+SYS".

    None where there is no pair, or where the matrix does not show them.
    """
    links: set[str] = set()
    for line in topology.splitlines():
        name, *cells = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name) and "X" in cells and int(name[3:]) in gpus:
            links |= {cells[other] for other in gpus if other != int(name[3:]) and other < len(cells)}
    return "+".join(sorted(links)) or None


def visible(devices: str | None, count: int) -> list[int]:
    """nvidia-smi's numbers of the first `count` devices under CUDA_VISIBLE_DEVICES (None: unset).

    Devices named by UUID are taken for the first ones: their numbers are not told.
    """
    names = [name.strip() for name in (devices or "").split(",")]
    if all(name.isdigit() for name in names):
        return [int(name) for name in names[:count]]
    return list(range(count))
