"""The example models are what they say they are, and the demo believes only what pytest reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import demo
import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from resnet50 import ResNet50


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(scope="module")
def resnet50() -> ResNet50:
    torch.manual_seed(0)
    return ResNet50()


def test_resnet50_has_the_published_number_of_parameters(resnet50: ResNet50) -> None:
    assert parameter_count(resnet50) == 25_557_032
    assert sum(isinstance(module, torch.nn.Conv2d) for module in resnet50.modules()) == 53
    assert len(list(resnet50.parameters())) == 161


def test_resnet50_strides_in_its_3x3_convolutions(resnet50: ResNet50) -> None:
    """Version 1.5; the first version strode in the 1x1 before them, with as many parameters."""
    strided = [
        module.kernel_size
        for block in resnet50.blocks
        for module in block.residual
        if isinstance(module, torch.nn.Conv2d) and module.stride == (2, 2)
    ]
    assert strided == [(3, 3)] * 3


@pytest.mark.parametrize(("pixels", "features"), [(32, (2048, 1, 1)), (224, (2048, 7, 7))])
def test_resnet50_shrinks_images_by_32(resnet50: ResNet50, pixels: int, features: tuple[int, int, int]) -> None:
    images = torch.randn(1, 3, pixels, pixels)
    resnet50.eval()
    with torch.inference_mode():
        assert resnet50.blocks(resnet50.stem(images)).shape == (1, *features)
        assert resnet50(images).shape == (1, 1000)


@pytest.mark.parametrize(("width", "layers", "heads"), [(128, 12, 4), (64, 2, 8)])
def test_gpt_has_gpt2s_number_of_parameters_with_a_tied_head(width: int, layers: int, heads: int) -> None:
    config = GPTConfig(width=width, layers=layers, heads=heads)
    embeddings = (config.vocabulary + config.context) * width
    block = 12 * width**2 + 13 * width  # 4 matrices of attention and 8 of the MLP; biases and two norms
    assert parameter_count(GPT(config)) == embeddings + layers * block + 2 * width


def test_gpt_never_sees_the_token_it_predicts() -> None:
    torch.manual_seed(0)
    config = GPTConfig(layers=2)
    model = GPT(config).eval()
    tokens = torch.randint(config.vocabulary, (1, config.context))
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % config.vocabulary
    with torch.inference_mode():
        same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same[:40].all()
    assert not same[40:].any()


def test_gpt_learns_a_text_by_heart() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=32)
    model = GPT(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = torch.randint(config.vocabulary, (2, config.context + 1))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.77, abs=0.2)  # log 16: an untrained model knows nothing
    assert losses[-1] < 0.1


# --- the demo: what it believes, with a pytest that only pretends


@pytest.fixture
def pytest_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Lets each act's pytest end with (exit status, measurements) as given, without running it."""

    def prepare(*acts: tuple[int, list[dict[str, Any]]]) -> None:
        waiting = iter(acts)

        def pretend(command: list[str], **_: object) -> SimpleNamespace:
            status, measurements = next(waiting)
            report = next(option for option in command if option.startswith("--ddp-json="))
            path = tmp_path / report.removeprefix("--ddp-json=")
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"measurements": measurements}))
            return SimpleNamespace(returncode=status)

        monkeypatch.setattr(demo, "ROOT", tmp_path)
        monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=pretend))

    return prepare


def measured(status: str, change: float = 0.0, metric: str = "p10", *, saved: int = 0) -> list[dict[str, Any]]:
    """The same for both examples."""
    comparison = {
        "limit": {"metric": metric},
        "status": status,
        "change": {"estimate": change, "low": change - 0.04, "high": change + 0.05},
    }
    verdict = {"status": status, "reason": "a-reason", "comparisons": [comparison]}
    return [
        {"nodeid": f"test_{name}.py::test_{name}", "test": {"name": name}, "saved": saved, "verdict": verdict}
        for name in ("gpt", "resnet50")
    ]


SAVED = (0, measured("NOT GATED", saved=1))
PASSED = (0, measured("PASS"))
CAUGHT = (1, measured("REGRESSED", 0.48))


def test_the_demo_succeeds_when_all_acts_go_as_told(
    pytest_says: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest_says(SAVED, PASSED, CAUGHT)
    assert demo.main() == 0
    told = capsys.readouterr().out
    assert "$ DDP_BUCKET_CAP_MB=0.001 pytest examples --ddp-world-size=2 --ddp-backend=gloo" in told
    assert "  resnet50: p10 +48% (+44% to +53%)\n" in told
    assert "All three acts went as told" in told


@pytest.mark.parametrize(
    ("acts", "why"),
    [
        ([(2, [])], "pytest ended with exit status 2, not 0."),
        ([(0, measured("NOT GATED"))], "test_gpt.py::test_gpt saved no baseline."),
        ([SAVED, CAUGHT], "pytest ended with exit status 1, not 0."),
        (
            [SAVED, (0, measured("NO BASELINE"))],
            "test_gpt.py::test_gpt was to be PASS or IMPROVED or INCONCLUSIVE, but is NO BASELINE (a-reason).",
        ),
        ([SAVED, (0, measured("PASS")[:1])], "not both examples were measured, says .demo/act2.json."),
        ([SAVED, PASSED, PASSED], "pytest ended with exit status 0, not 1."),
        (
            [SAVED, PASSED, (1, [measured("REGRESSED")[0], measured("PASS")[1]])],
            "test_resnet50.py::test_resnet50 was to be REGRESSED, but is PASS (a-reason).",
        ),
        (
            [SAVED, PASSED, (1, [measured("REGRESSED")[0], {**measured("REGRESSED")[1], "verdict": None}])],
            "not both examples were measured, says .demo/act3.json.",
        ),
        (
            [SAVED, PASSED, (1, measured("REGRESSED", 0.48, "cpu_p10"))],
            "test_gpt.py::test_gpt is REGRESSED, but not in its step time.",
        ),
    ],
)
def test_the_demo_fails_when_an_act_does_not_go_as_told(
    pytest_says: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    acts: list[tuple[int, list[dict[str, Any]]]],
    why: str,
) -> None:
    pytest_says(*acts)
    assert demo.main() == 1
    told = capsys.readouterr().out
    assert f"The demo did NOT go as told: {why}" in told
    assert "All three acts" not in told
