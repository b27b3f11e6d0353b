"""Facts about where a rank runs, as flat names and scalars. What they mean for a comparison is `baseline`'s to say."""

from __future__ import annotations

import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_ddpperf.records.samples import Scalar
from pytest_ddpperf.wire.boot import number_in, output_of


def versions() -> dict[str, Scalar]:
    """Software and host, the same for every launch of a session."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version(),
        "cpu_model": _cpu_model(),
        "host": platform.node(),
        "kernel": platform.release(),
    }


def state() -> dict[str, Scalar]:
    """Switches that the user's code may have set by now."""
    return {
        "matmul_precision": _matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


# The words of torch.set_float32_matmul_precision, by what they come to in CUDA and in oneDNN.
_PRECISIONS = {("ieee", "ieee"): "highest", ("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}


def _matmul_precision() -> str:
    """Return how products of float32 matrices are rounded; each backend has a switch of its own since torch 2.9."""
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if not (hasattr(switches[0], "fp32_precision") and hasattr(switches[1], "matmul")):
        return torch.get_float32_matmul_precision()
    cuda, mkldnn = (str(each.fp32_precision).replace("none", "ieee") for each in (switches[0], switches[1].matmul))
    return _PRECISIONS.get((cuda, mkldnn), f"cuda {cuda}, mkldnn {mkldnn}")


def device(kind: str, index: int = 0) -> dict[str, Scalar]:
    """Return the state of the accelerator: model, memory, and limits, clocks and temperature by nvidia-smi."""
    if kind != "cuda":
        return {"device_model": None if kind == "cpu" else kind}
    properties = torch.cuda.get_device_properties(index)
    facts: dict[str, Scalar] = {
        "device_model": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30),
        "mig_profile": properties.name.partition(" MIG ")[2] or None,
    }
    uuid = str(getattr(properties, "uuid", ""))
    return facts | _nvidia_smi(f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid)


_SMI_FIELDS = {
    "driver": "driver_version",
    "power_limit_watts": "enforced.power.limit",
    "clock_lock": "clocks.applications.graphics",
    "clock_mhz": "clocks.sm",
    "temperature_c": "temperature.gpu",
}


def _nvidia_smi(device: str) -> dict[str, Scalar]:
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    lines = output_of("nvidia-smi", query, "--format=csv,noheader,nounits", *(["-i", device] if device else []))
    return parse_smi(lines)


def parse_smi(said: str) -> dict[str, Scalar]:
    """The first row of nvidia-smi's CSV for `_SMI_FIELDS`, which may stand below a warning; none where there is none.
    "[N/A]" and its kin are unknown, so None."""
    rows = ([part.strip() for part in line.split(",")] for line in said.splitlines())
    row = next((row for row in rows if len(row) == len(_SMI_FIELDS)), [])
    return {name: text if name == "driver" else number_in(text) for name, text in zip(_SMI_FIELDS, row, strict=False)}


_CPUINFO = Path("/proc/cpuinfo")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def probe() -> dict[str, Scalar]:
    """Return what this machine and this torch offer; run in a rank without a process group."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None else "cpu"
    facts = versions() | {
        "device_type": kind,
        "device_count": torch.accelerator.device_count() if accelerator is not None else 0,
        # "cpu:gloo,cuda:nccl": which backend torch itself would choose for a device
        "default_backends": ",".join(f"{k}:{v}" for k, v in dist.Backend.default_device_backend_map.items()),
        "backends": ",".join(_backends()),
    }
    if accelerator is not None:
        facts |= device(kind)
    if kind == "cuda":
        facts["device_addresses"] = ",".join(map(pci_address, range(torch.cuda.device_count())))
        facts["topology"] = topology() or None
    return facts


def topology() -> str:
    """nvidia-smi's matrix of what links GPUs, without the escapes that underline its header, piped or not."""
    return _ESCAPES.sub("", output_of("nvidia-smi", "topo", "-m")).expandtabs()


def pci_address(index: int) -> str:
    """The folder's name in /sys/bus/pci/devices of a visible CUDA device."""
    properties: Any = torch.cuda.get_device_properties(index)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _backends() -> list[str]:
    known = (name for name in dist.Backend.backend_list if dist.is_backend_available(name))
    return [name for name in known if name not in ("undefined", "fake", "threaded")]


def _nccl_version() -> str | None:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(
        map(str, torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    )


def _cpu_model() -> str:
    if sys.platform == "darwin" and (brand := output_of("sysctl", "-n", "machdep.cpu.brand_string").strip()):
        return brand
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    # Linux on Arm has numbers of the core's maker, and no name.
    arm = [fields[name] for name in ("CPU implementer", "CPU variant", "CPU part") if name in fields]
    known = " ".join([platform.machine(), *arm]) if arm else platform.processor() or platform.machine()
    return fields.get("model name") or known
