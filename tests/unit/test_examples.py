"""The example models are what they say they are, and the demo believes only what pytest reports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import demo
import pytest
import torch

from pytest_ddpperf.suite.models import GPT, RESNETS, GPTConfig, ResNet


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(scope="module")
def resnet50() -> ResNet:
    torch.manual_seed(0)
    return RESNETS["resnet50"]()


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnext50_32x4d", 25_028_904),
        ("resnext101_32x8d", 88_791_336),
    ],
)
def test_a_resnet_has_the_published_number_of_parameters(
    name: str, published: int
) -> None:
    with torch.device("meta"):
        assert parameter_count(RESNETS[name]()) == published


def test_resnet50_has_the_published_layers(resnet50: ResNet) -> None:
    assert (
        sum(
            isinstance(module, torch.nn.Conv2d) for module in resnet50.modules()
        )
        == 53
    )
    assert len(list(resnet50.parameters())) == 161


def test_resnet50_strides_in_its_3x3_convolutions(resnet50: ResNet) -> None:
    """Version 1.5; the first version strode in the 1x1 before them, with as many parameters."""
    strided = [
        module.kernel_size
        for block in resnet50.blocks
        for module in block.residual
        if isinstance(module, torch.nn.Conv2d) and module.stride == (2, 2)
    ]
    assert strided == [(3, 3)] * 3


@pytest.mark.parametrize(
    ("pixels", "features"), [(32, (2048, 1, 1)), (224, (2048, 7, 7))]
)
def test_resnet50_shrinks_images_by_32(
    resnet50: ResNet, pixels: int, features: tuple[int, int, int]
) -> None:
    images = torch.randn(1, 3, pixels, pixels)
    resnet50.eval()
    with torch.inference_mode():
        assert resnet50.blocks(resnet50.stem(images)).shape == (1, *features)
        assert resnet50(images).shape == (1, 1000)


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


# --- the demo: what it believes, with a pytest that only pretends


@pytest.fixture
def pytest_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Path]:
    """Lets each act's pytest end with (exit status, measurements) as given, without running it; the
    demo's folder."""

    def prepare(*acts: tuple[int, list[dict[str, Any]] | None]) -> Path:
        waiting = iter(acts)

        def pretend(command: list[str]) -> int:
            status, measurements = next(waiting)
            report = command[-1].removeprefix("--ddp-json=")
            if measurements is not None:
                (demo.DEMO / report).write_text(
                    json.dumps({"measurements": measurements})
                )
            if "--ddp-save-baseline" in command:
                (demo.DEMO / "baselines").mkdir()
                (demo.DEMO / "baselines" / "test_train_step.json").write_text(
                    "{}"
                )
            return status

        monkeypatch.setattr(demo, "DEMO", tmp_path / ".demo")
        monkeypatch.setattr(demo, "run", pretend)
        return demo.DEMO

    return prepare


def measured(
    status: str,
    *,
    saved: int = 0,
    differing: Sequence[str] = (),
    stored: object = None,
) -> list[dict[str, Any]]:
    return [
        {
            "saved": saved,
            "verdict": {"status": status, "reason": "a-reason"},
            "stored_verdict": stored,
            "baseline_side": {"differing": list(differing)},
        }
    ]


SAVED = (0, measured("NOT GATED", saved=1))
PASSED = (0, measured("PASS"))
CAUGHT = (1, measured("REGRESSED", differing=["smallgpt/train.py"]))


def asked_of_git(folder: Path, *arguments: str) -> list[str]:
    return subprocess.check_output(
        ["git", "-C", folder, *arguments], text=True
    ).splitlines()


def test_the_demo_plays_a_small_history_of_a_project(
    pytest_says: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = pytest_says(
        SAVED,
        PASSED,
        CAUGHT,
        (1, measured("REGRESSED", stored={"status": "REGRESSED"})),
    )
    folder.mkdir()
    (folder / "left-by-an-earlier-demo").touch()
    # as in a hook
    monkeypatch.setenv("GIT_DIR", str(folder.parent / "elsewhere"))
    assert demo.main() == 0
    monkeypatch.delenv("GIT_DIR")
    output = capsys.readouterr().out
    assert "$ pytest --ddp-against=HEAD~1 --ddp-json=act3.json\n" in output
    assert (
        "Green, PASS: the step is not slower than the limits allow.\n" in output
    )
    assert (
        "Red, REGRESSED. The line 'why' names the all-reduces and the file that differs,"
        " smallgpt/train.py" in output
    )
    assert (
        "Red, REGRESSED: slower than the baseline's own code, measured just now.\n"
        in output
    )
    assert re.search(r"All four acts went as expected, in \d+ s\.", output)

    assert asked_of_git(folder, "log", "--format=%s") == [
        "Use smaller gradient buckets to lower memory",
        "Record a baseline",
        "A small GPT under DDP, and a test that times its training step",
    ]
    assert asked_of_git(
        folder, "show", "--format=", "--name-only", "HEAD~1"
    ) == ["baselines/test_train_step.json"]
    assert asked_of_git(folder, "show", "--format=", "--name-only", "HEAD") == [
        "smallgpt/train.py"
    ]
    changed = [
        line.split("  #")[0]
        for line in asked_of_git(folder, "show", "--format=", "-U0")[-2:]
    ]
    assert changed == ["-BUCKET_CAP_MB = 25", "+BUCKET_CAP_MB = 0.03"]
    assert not asked_of_git(folder, "status", "--porcelain")
    assert not (folder / "left-by-an-earlier-demo").exists()


@pytest.mark.parametrize(
    ("acts", "why"),
    [
        ([(2, [])], "pytest ended with exit status 2 in act 1."),
        ([(0, None)], "pytest wrote no report in act 1."),
        ([(0, measured("NOT GATED"))], "no baseline was saved."),
        (
            [SAVED, CAUGHT],
            "the verdict was to be PASS or IMPROVED or INCONCLUSIVE, but is REGRESSED (a-reason).",
        ),
        (
            [SAVED, (1, measured("PASS"))],
            "pytest ended with exit status 1, though the verdict is PASS (a-reason).",
        ),
        ([SAVED, (0, [])], "the test was not measured in act 2."),
        (
            [SAVED, PASSED, PASSED],
            "the verdict was to be REGRESSED, but is PASS (a-reason).",
        ),
        (
            [SAVED, PASSED, (1, [{"verdict": None}])],
            "the test was not measured in act 3.",
        ),
        (
            [SAVED, PASSED, (0, CAUGHT[1])],
            "pytest ended with exit status 0, though the verdict is REGRESSED (a-reason).",
        ),
        (
            [
                SAVED,
                PASSED,
                (1, measured("REGRESSED", differing=["smallgpt/gpt.py"])),
            ],
            "the report was to name smallgpt/train.py as what differs, but names smallgpt/gpt.py.",
        ),
        (
            [SAVED, PASSED, CAUGHT, (0, measured("NO BASELINE"))],
            (
                "the verdict was to be REGRESSED or PASS or IMPROVED or INCONCLUSIVE, but is NO"
                " BASELINE (a-reason)."
            ),
        ),
    ],
)
def test_the_demo_fails_when_an_act_does_not_go_as_expected(
    pytest_says: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    acts: list[tuple[int, list[dict[str, Any]] | None]],
    why: str,
) -> None:
    pytest_says(*acts)
    assert demo.main() == 1
    output = capsys.readouterr().out
    assert (
        f"The demo did NOT go as expected: {why}\npytest's output above says more"
        in output
    )
    assert "All four acts" not in output


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
)
def test_what_ends_the_demo_ends_its_pytest(
    signum: signal.Signals, tmp_path: Path
) -> None:
    # a moment later: a signal while the demo starts it would come before the demo waits
    waits = (
        "import os, time; time.sleep(0.5); print(os.getpid(), flush=True);"
        " time.sleep(600)"
    )
    code = f"""if True:
        import signal, sys, demo
        from pathlib import Path
        signal.signal({int(signum)}, signal.SIG_DFL)  # who starts tests in the background may ignore it
        demo.DEMO = Path({str(tmp_path)!r})
        demo.PROGRESS_SECONDS = 600
        demo.play = lambda: demo.run([sys.executable, "-c", {waits!r}])
        demo.end_by_signals()
        demo.main()
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(demo.__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signum)
        try:
            assert process.wait(60) == 128 + signum
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
