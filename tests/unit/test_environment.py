"""What is told of a machine and its torch, of answers that this machine does not give."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytest_ddpperf.rank import environment

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
X86 = "processor\t: 0\nmodel name\t: AMD EPYC\nmodel\t: 1\n\nprocessor\t: 1\nmodel name\t: another\n"


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [(X86, "AMD EPYC"), (ARM, "aarch64 0x41 0x1 0xd0c"), ("", "aarch64"), (None, "aarch64")],
    ids=["x86", "arm", "empty", "none"],
)
def test_a_cpu_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, model: str
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


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("580.1, 700.00, 1980, 345, 31", ("580.1", 700.0, 1980.0, 345.0, 31.0)),
        ("580.1, [N/A], [Requested functionality has been deprecated], 345, 31", ("580.1", None, None, 345.0, 31.0)),
        ("580.1, 700.00, Requested functionality has been deprecated, 345, 31", ("580.1", 700.0, None, 345.0, 31.0)),
    ],
)
def test_what_nvidia_smi_does_not_tell_is_unknown(line: str, facts: tuple[object, ...]) -> None:
    assert tuple(environment.parse_smi(line).values()) == facts


def test_the_matrix_of_gpus_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "output_of", lambda *command: "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV2\n")
    assert environment.topology() == "        GPU0    GPU1\nGPU0     X      NV2\n"
