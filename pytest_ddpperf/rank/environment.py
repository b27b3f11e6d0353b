"""Facts about where a rank runs, as flat names and scalars. What they mean for a comparison is
`baseline`'s to say."""

import multiprocessing
import platform
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.context import Context, noting
from pytest_ddpperf.records.plan import KNOWN_BACKENDS, NCCL
from pytest_ddpperf.records.samples import FoundFacts
from pytest_ddpperf.version import __version__
from pytest_ddpperf.wire.boot import (
    children,
    contents,
    number_in,
    nvidia_smi,
    output_of,
    topology,
)


def of_rank(ctx: Context, notes: list[str]) -> FoundFacts:
    """Return the facts of a rank after its window: its device and, of a node's first rank, what is
    the same for all of that node. `notes` say which are unknown."""
    facts: FoundFacts = {}
    with noting("facts of the device are", notes):
        facts |= device(ctx.device)
    if ctx.local_rank == 0:
        with noting("facts of torch are", notes):
            facts |= versions()
            facts |= state()
    if ctx.rank == 0:
        with noting("the implementation of the backend is", notes):
            facts["implementation"] = _implementation(ctx.device)
    return facts


def versions() -> FoundFacts:
    """Software and host, the same for every launch of a session."""
    return {
        "python": platform.python_version(),
        "pytest-ddpperf": __version__,  # which may time otherwise
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version(),
        "cpu_model": _cpu_model(),
        "host": platform.node(),
        "kernel": platform.release(),
    }


def state() -> FoundFacts:
    """Switches that the user's code may have set by now."""
    return {
        "matmul_precision": _matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        # unset in baselines before it was read
        "cudnn_deterministic": torch.backends.cudnn.deterministic or None,
        "cudnn_precision": _precision("cudnn:conv"),
        "attention": ", ".join(
            name
            for name in _ATTENTION
            if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        # coverage or a debugger slows down each line; None as in older baselines
        "traced": sys.gettrace() and True,
    }


# kernels of scaled_dot_product_attention
_ATTENTION = ("flash", "mem_efficient", "cudnn", "math")
# The words of torch.set_float32_matmul_precision, by what they come to in CUDA and in oneDNN.
_PRECISIONS = {
    ("ieee", "ieee"): "highest",
    ("tf32", "tf32"): "high",
    ("tf32", "bf16"): "medium",
}


def _matmul_precision() -> str:
    """Return how products of float32 matrices are rounded; each backend has a switch of its own
    since torch 2.9."""
    cuda = _precision("cuda:matmul")
    mkldnn = _precision("mkldnn:matmul")
    if cuda is None or mkldnn is None:
        return torch.get_float32_matmul_precision()
    cuda = cuda.replace("none", "ieee")
    mkldnn = mkldnn.replace("none", "ieee")
    return _PRECISIONS.get((cuda, mkldnn), f"cuda {cuda}, mkldnn {mkldnn}")


def _precision(switch: str) -> str | None:
    """Return a switch's word; None if this torch lacks it."""
    found = torch_names.find(f"torch.backends.{switch}.fp32_precision")
    return None if found is None else str(found)


def device(place: torch.device) -> FoundFacts:
    """Return the state of an accelerator: model, memory, and limits, clocks and temperature by
    nvidia-smi."""
    if place.type != "cuda":
        return {"device_model": None if place.type == "cpu" else place.type}
    properties = torch.cuda.get_device_properties(place)
    facts: FoundFacts = {
        "device_model": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30),
        "mig_profile": properties.name.partition(" MIG ")[2] or None,
    }
    uuid = str(getattr(properties, "uuid", ""))
    if facts["mig_profile"]:
        # nvidia-smi knows the GPU that it is a part of, by its address
        uuid = pci_address(place.index)
    elif uuid and not uuid.startswith("GPU-"):
        uuid = f"GPU-{uuid}"
    return facts | _nvidia_smi(uuid)


_SMI_FIELDS = {
    "driver": "driver_version",
    "power_limit_watts": "enforced.power.limit",
    "clock_mhz": "clocks.sm",
    "temperature_c": "temperature.gpu",
    "slowdown": "clocks_event_reasons.active",
}
# heat, or a lack of power. A cap on power (0x4) is usual, and not an event
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80


def _nvidia_smi(device: str) -> FoundFacts:
    """Return what nvidia-smi says of a device; what it does not tell, as "[N/A]" and its kin, is
    None."""
    fields = [*_SMI_FIELDS.values()]
    of_device = ("-i", device) if device else ()
    rows = nvidia_smi(fields, *of_device)
    if not rows:
        # It refuses a whole query for one field that it does not know.
        alone = [nvidia_smi([field], *of_device) or [[""]] for field in fields]
        rows = [[answer[0][0] for answer in alone]]
    said = dict(zip(_SMI_FIELDS, rows[0], strict=True))
    reasons = (
        int(said["slowdown"], 16) if said["slowdown"].startswith("0x") else 0
    )
    facts: FoundFacts = {name: number_in(text) for name, text in said.items()}
    return facts | {
        "driver": said["driver"] or None,
        "slowdown": "heat or power" if reasons & _SLOWED else None,
    }


_CPUINFO = Path("/proc/cpuinfo")


def probe() -> FoundFacts:
    """Return what this machine and this torch offer; run in a rank without a process group."""
    accelerator: Any = torch.accelerator
    kind = "cpu"
    count = 0
    if accelerator.is_available():
        kind = accelerator.current_accelerator().type
        count = accelerator.device_count()
    defaults = dist.Backend.default_device_backend_map.items()
    facts = versions() | {
        "device_type": kind,
        "device_count": count,
        # "cpu:gloo,cuda:nccl": which backend torch itself would choose for a device
        "default_backends": ",".join(
            f"{each}:{backend}" for each, backend in defaults
        ),
        "backends": ",".join(_backends()),
    }
    if kind != "cpu":
        facts |= device(torch.device(kind, 0))
    if kind == "cuda":
        addresses = [*map(pci_address, range(count))]
        facts["device_addresses"] = ",".join(addresses)
        facts["device_numbers"] = numbers_of(addresses)
        facts["topology"] = "\n".join(topology()) or None
    return facts


def numbers_of(addresses: Sequence[str]) -> str:
    """Return nvidia-smi's numbers of devices, as in its matrix, with commas; "" unless all are
    known. CUDA's order is another: the fastest device first, or as CUDA_VISIBLE_DEVICES has them.
    """
    rows = nvidia_smi(["index", "pci.bus_id"])
    numbers = {
        bus[-len("0000:00:00.0") :].lower(): number
        for number, bus in rows
        if number.isdecimal()
    }
    if not numbers.keys() >= {*addresses}:
        return ""
    return ",".join(numbers[each] for each in addresses)


def pci_address(index: int) -> str:
    """The folder's name in /sys/bus/pci/devices of a visible CUDA device; "" before torch 2.8."""
    found: Any = torch.cuda.get_device_properties(index)
    if not hasattr(found, "pci_bus_id"):
        return ""
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _backends() -> list[str]:
    names = dict.fromkeys((*dist.Backend.backend_list, *KNOWN_BACKENDS))
    return list(filter(_is_available, names))


def _is_available(backend: str) -> bool:
    if backend in ("undefined", "fake", "threaded"):
        return False
    in_torchcomms = torch_names.find(
        "torch.distributed.distributed_c10d:_is_torchcomms_backend"
    )
    if in_torchcomms is not None and in_torchcomms(backend):
        return True
    # Names of NCCL are known to each build.
    if backend in NCCL and not dist.is_nccl_available():
        return False
    return dist.is_backend_available(backend)


def _implementation(place: torch.device) -> str | None:
    """Return the class of what carries out collectives on a device: one name of a backend may stand
    for several. None without a process group."""
    group: Any = dist.group.WORLD
    if group is None:
        return None
    return type(group._get_backend(place)).__name__


def _nccl_version() -> str | None:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cpu_model() -> str:
    if sys.platform == "darwin":
        brand = output_of("sysctl", "-n", "machdep.cpu.brand_string").strip()
        if brand:
            return brand
    fields: dict[str, str] = {}
    for line in contents(_CPUINFO).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if fields.get("model name"):
        return fields["model name"]
    # Linux on Arm has numbers of the core's maker, and no name.
    names = ("CPU implementer", "CPU variant", "CPU part")
    arm = [fields[name] for name in names if name in fields]
    if arm:
        return " ".join([platform.machine(), *arm])
    return platform.processor() or platform.machine()


# For which a rank stands still after its window: long against what ends by itself, short against a
# launch.
_IDLE_SECONDS = 0.01
# That a rank needs then; threads that only poll need less.
_BUSY_CORES = 0.5


def goes_on() -> bool:
    """Whether other Python threads of this process, or its children, have work to do while this
    thread sleeps: what steps left to them. Native threads do not count, for OpenMP's spin; nor do
    daemons of multiprocessing and the thread that pins their memory, for workers of a DataLoader
    work ahead. False where the kernel does not say it."""
    current = threading.current_thread()
    busy = {
        each.native_id
        for each in threading.enumerate()
        if each is not current and "(_pin_memory_loop)" not in each.name
    }
    daemons = (
        child.pid for child in multiprocessing.active_children() if child.daemon
    )
    busy |= {*children()}.difference(daemons)

    def needed_ns() -> int:
        """Return for how long they have run, or waited for a core."""
        needed = 0
        for number in busy:
            both = contents(Path(f"/proc/{number}/schedstat")).split()[:2]
            needed += sum(map(int, both))
        return needed

    began = time.monotonic_ns()
    before = needed_ns()
    time.sleep(_IDLE_SECONDS)
    return needed_ns() - before > _BUSY_CORES * (time.monotonic_ns() - began)
