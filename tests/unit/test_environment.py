"""What is told of a machine and its torch, of answers that this machine does not give."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_ddpperf.rank import environment
from pytest_ddpperf.wire import boot

ARM = """\
processor\t: 0
BogoMIPS\t: 243.75
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd0c

processor\t: 1
CPU part\t: 0xd0d
"""
X86 = (
    "processor\t: 0\nmodel name\t: AMD EPYC\nmodel\t: 1\n\nprocessor\t: 1\nmodel name\t: "
    "another\n"
)


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        (X86, "AMD EPYC"),
        (ARM, "aarch64 0x41 0x1 0xd0c"),
        ("", "aarch64"),
        (None, "aarch64"),
    ],
    ids=["x86", "arm", "empty", "none"],
)
def test_a_cpu_has_a_name_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpuinfo: str | None,
    model: str,
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert environment._cpu_model() == model


@pytest.fixture
def precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("word", ["highest", "high", "medium"])
def test_rounding_is_told_by_torchs_word(word: str) -> None:
    torch.set_float32_matmul_precision(word)
    assert environment.state()["matmul_precision"] == word


def test_lines_that_are_traced_are_a_fact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert environment.state()["traced"] is None
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert environment.state()["traced"] is True


def test_switches_that_cannot_be_read_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a torch that has no such switch for each backend."""
    ctx: Any = SimpleNamespace(rank=0, local_rank=0, device=torch.device("cpu"))
    for switch, name in (("cudnn", "conv"), ("mkldnn", "matmul")):
        module = type(getattr(torch.backends, switch))
        monkeypatch.delattr(module, name, raising=False)
    notes: list[str] = []
    facts = environment.of_rank(ctx, notes)
    assert facts["cudnn_precision"] is None
    assert facts["matmul_precision"] == torch.get_float32_matmul_precision()
    assert notes == []


@pytest.mark.parametrize(
    ("built", "in_torchcomms", "has"),
    [
        (True, (), ["gloo", "nccl", "nccl2", "nccl-lazy", "mpi"]),
        (False, (), ["gloo", "mpi"]),
        (False, ("ncclx",), ["gloo", "mpi", "ncclx"]),
    ],
)
def test_names_of_nccl_are_there_if_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
    built: bool,
    in_torchcomms: tuple[str, ...],
    has: list[str],
) -> None:
    """torch 2.14 registers them in each build, some only once they are asked for."""
    registered = {"gloo", "nccl", "nccl2", "nccl-lazy", "mpi", "fake"}
    names = ["undefined", "gloo", "nccl", "fake"]
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", names)
    monkeypatch.setattr(
        torch.distributed, "is_backend_available", registered.__contains__
    )
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built)
    monkeypatch.setattr(
        environment.torch_names, "find", lambda name: in_torchcomms.__contains__
    )
    assert sorted(environment._backends()) == sorted(has)


def test_what_carries_collectives_out_is_a_fact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`nccl` is ProcessGroupNCCL up to torch 2.14, and ProcessGroupNCCL2 from 2.15 on."""

    class ProcessGroupNCCL2:
        pass

    asked: list[torch.device] = []

    def backend_of(device: torch.device) -> ProcessGroupNCCL2:
        asked.append(device)
        return ProcessGroupNCCL2()

    ctx: Any = SimpleNamespace(rank=0, local_rank=0, device=torch.device("cpu"))
    notes: list[str] = []
    assert environment.of_rank(ctx, notes)["implementation"] is None
    world = SimpleNamespace(_get_backend=backend_of)
    monkeypatch.setattr(
        torch.distributed, "group", SimpleNamespace(WORLD=world)
    )
    facts = environment.of_rank(ctx, notes)
    assert facts["implementation"] == "ProcessGroupNCCL2"
    assert asked == [ctx.device]
    monkeypatch.setattr(
        torch.distributed, "group", SimpleNamespace(WORLD=SimpleNamespace())
    )
    assert "implementation" not in environment.of_rank(ctx, notes)
    (note,) = notes
    assert note.startswith("the implementation of the backend is unknown: ")


SMI = """#!/bin/sh
for name in {refused}; do
    case "$1" in *$name*) echo "Field \\"$name\\" is not a valid field to query."; exit 2;; esac
done
case "$1" in
    *index*) printf '{table}';;
    *,*) echo "a warning"; echo "{row}";;
    *driver_version*) echo "580.1";;
    *temperature*) echo "31";;
    *) echo "[N/A]";;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it for an nvidia-smi that answers so."""

    def make(*, row: str = "", refused: str = "", table: str = "") -> None:
        (tmp_path / "nvidia-smi").write_text(
            SMI.format(row=row, refused=refused, table=table)
        )
        (tmp_path / "nvidia-smi").chmod(0o700)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


@pytest.mark.parametrize(
    ("model", "uuid", "asked"),
    [
        ("NVIDIA H100", "8932f937-d72c", "GPU-8932f937-d72c"),
        ("NVIDIA H100", "GPU-8932f937-d72c", "GPU-8932f937-d72c"),
        ("NVIDIA H100 MIG 1g.10gb", "8932f937-d72c", "0000:17:00.0"),
    ],
)
def test_nvidia_smi_is_asked_for_the_gpu_of_a_device(
    monkeypatch: pytest.MonkeyPatch, model: str, uuid: str, asked: str
) -> None:
    """Of a MIG device it knows no clock and no limit."""
    properties = SimpleNamespace(
        name=model,
        total_memory=80 << 30,
        uuid=uuid,
        pci_domain_id=0,
        pci_bus_id=0x17,
        pci_device_id=0,
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: properties
    )
    monkeypatch.setattr(environment, "_nvidia_smi", lambda name: {"smi": name})
    facts = environment.device(torch.device("cuda", 0))
    assert facts["smi"] == asked
    assert facts["device_model"] == model


@pytest.mark.parametrize(
    ("row", "refused", "facts"),
    [
        # a cap on power
        (
            "580.1, 700.00, 345, 31, 0x0000000000000004",
            "",
            ("580.1", 700.0, 345.0, 31.0, None),
        ),
        (
            "580.1, 700.00, 345, 91, 0x0000000000000044",
            "",
            ("580.1", 700.0, 345.0, 91.0, "heat or power"),
        ),
        (
            "580.1, [N/A], Requested functionality has been deprecated, 31, ",
            "",
            ("580.1", None, None, 31.0, None),
        ),
        ("", "enforced.power.limit", ("580.1", None, None, 31.0, None)),
    ],
    ids=["all", "too hot", "unknown values", "an unknown field"],
)
def test_what_nvidia_smi_does_not_tell_is_unknown(
    smi: Callable[..., None], row: str, refused: str, facts: tuple[object, ...]
) -> None:
    """A field that it does not know costs that field alone."""
    smi(row=row, refused=refused)
    assert tuple(environment._nvidia_smi("GPU-1").values()) == facts


def test_without_nvidia_smi_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert {*environment._nvidia_smi("").values()} == {None}


def test_devices_have_nvidia_smis_numbers_by_their_addresses(
    smi: Callable[..., None],
) -> None:
    smi(
        table=r"0, 00000000:1B:00.0\n1, 00000000:43:00.0\n2, 00000000:52:00.0\n"
    )
    assert environment.numbers_of(["0000:52:00.0", "0000:1b:00.0"]) == "2,0"
    assert environment.numbers_of(["0000:1b:00.0", "0000:99:00.0"]) == ""


def test_the_matrix_of_gpus_is_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        boot,
        "output_of",
        lambda *command: "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV2\n",
    )
    assert boot.topology() == [
        "        GPU0    GPU1",
        "GPU0     X      NV2",
    ]


def test_before_torch_28_a_device_has_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties: Any = SimpleNamespace(name="H100")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: properties
    )
    assert environment.pci_address(0) == ""
    properties.pci_domain_id, properties.pci_bus_id = 0, 23
    properties.pci_device_id = 0
    assert environment.pci_address(0) == "0000:17:00.0"


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel does not say it"
)
@pytest.mark.parametrize(
    ("name", "goes_on"),
    [("of a step", True), ("Thread-1 (_pin_memory_loop)", False)],
)
def test_a_thread_that_pins_memory_works_ahead(
    name: str, *, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers of a DataLoader do."""
    monkeypatch.setattr(environment, "_BUSY_CORES", 0.1)
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, name=name)
    thread.start()
    try:
        # a thread that waits for a core all the time is not seen
        looks = [environment.goes_on() for _ in range(20)]
        assert any(looks) is goes_on
    finally:
        over.set()
        thread.join()
