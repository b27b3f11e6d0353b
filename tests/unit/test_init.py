"""`ddpperf init`: what it writes, and the recipes that it has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_ddpperf.cli import init
from pytest_ddpperf.cli.main import main

RECIPES = Path(init.__file__).with_name("recipes")
FILES = {
    "github": [
        ".github/workflows/perf-comment.yml",
        ".github/workflows/perf.yml",
    ],
    "github-cpu": [
        ".github/workflows/perf-comment.yml",
        ".github/workflows/perf.yml",
    ],
    "github-main": [
        ".github/workflows/perf-history.yml",
        ".github/workflows/perf-main.yml",
    ],
    "gitlab": [".gitlab/perf.yml"],
    "jenkins": ["Jenkinsfile.perf"],
    "kubernetes": ["perf-job.yaml"],
    "slurm": ["perf.sbatch"],
}
FIRST = "tests/perf/test_train_step.py"
NEXT = "next   change what is marked `adapt`, then: "
RUN = f"{NEXT}python -m pytest tests/perf"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    return tmp_path


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["init", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def recipe(path: str) -> Any:
    """Return a workflow. `on` is True to YAML 1.1."""
    return yaml.safe_load((RECIPES / path).read_text(encoding="utf-8"))


def test_it_writes_a_first_test_and_says_what_comes_next(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines_of(capsys) == [f"wrote  {FIRST}", RUN]
    first = Path(FIRST).read_text()
    assert "def test_train_step(ddp_benchmark):" in first
    # how a program is timed, for who has no step to call
    assert "ddp_benchmark.script(" in first
    assert "ddp_benchmark.loop(" in first
    assert "ddp_benchmark.command(" in first
    assert [path for path in project.rglob("*") if path.is_file()] == [
        project / FIRST
    ]


@pytest.mark.parametrize("service", FILES)
def test_it_writes_the_recipe_of_a_service(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [FIRST, *FILES[service]]
    commands = {
        "kubernetes": "kubectl replace --force -f perf-job.yaml",
        "slurm": "sbatch --wait perf.sbatch",
    }
    assert lines_of(capsys, "--ci", service) == [
        *(f"wrote  {file}" for file in written),
        NEXT + commands.get(service, "python -m pytest tests/perf"),
    ]
    for file in FILES[service]:
        stored = RECIPES / service / file
        assert Path(file).read_text() == stored.read_text()


def test_what_exists_stays_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = Path(".github/workflows/perf.yml")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    dangling = mine.with_name("perf-comment.yml")
    dangling.symlink_to("nowhere.yml")
    other = Path("tests/perf/test_gpt.py")
    other.parent.mkdir(parents=True)
    other.write_text("")
    assert lines_of(capsys, "--ci=github") == [
        "kept   tests/perf: it has tests",
        f"kept   {dangling}: it exists, with other content",
        f"kept   {mine}: it exists, with other content",
        RUN,
    ]
    assert mine.read_text() == "mine"
    assert dangling.is_symlink()
    assert not dangling.exists()
    assert not Path(FIRST).exists()


def test_tests_below_the_folder_count_and_a_conftest_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path("tests/perf")
    (folder / "gpu").mkdir(parents=True)
    (folder / "conftest.py").write_text("")
    assert not any("kept" in line for line in lines_of(capsys))
    Path(FIRST).unlink()
    (folder / "gpu/test_gpt.py").write_text("")
    assert "kept   tests/perf: it has tests" in lines_of(capsys)


def test_a_second_call_keeps_all_that_the_first_wrote(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines_of(capsys, "--ci=gitlab")
    assert lines_of(capsys, "--ci=gitlab") == [
        "kept   tests/perf: it has tests",
        "kept   .gitlab/perf.yml: it exists",
        RUN,
    ]


def test_a_recipe_outside_of_the_top_of_a_repository_is_noted(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / ".git").rmdir()
    *_, note, _ = lines_of(capsys, "--ci=jenkins")
    assert note == "note   services read this at the top of a git repository"


def test_a_file_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("tests").write_text("")
    assert main(["init"]) == 4
    error = f"ddpperf: error: {FIRST}: cannot be written: "
    assert capsys.readouterr().err.startswith(error)


def test_a_service_without_a_recipe_is_refused_with_those_that_have_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", "--ci=travis"]) == 4
    error = capsys.readouterr().err
    assert all(service in error for service in FILES)


# --- the recipes


def test_both_workflows_for_pull_requests_have_the_same_comment() -> None:
    comment = ".github/workflows/perf-comment.yml"
    shared, own = (
        (RECIPES / service / comment).read_text("utf-8")
        for service in ("github", "github-cpu")
    )
    assert shared == own


@pytest.mark.parametrize("service", ["github", "github-cpu"])
def test_workflows_can_be_read_and_find_each_other(service: str) -> None:
    folder = f"{service}/.github/workflows"
    first, comment = map(
        recipe, (f"{folder}/perf.yml", f"{folder}/perf-comment.yml")
    )
    assert comment[True]["workflow_run"]["workflows"] == [first["name"]]
    main_folder = "github-main/.github/workflows"
    every, kept = map(
        recipe,
        (f"{main_folder}/perf-main.yml", f"{main_folder}/perf-history.yml"),
    )
    assert kept[True]["workflow_run"]["workflows"] == [every["name"]]
    *_, uploads = first["jobs"]["perf"]["steps"]
    downloads, *_ = comment["jobs"]["comment"]["steps"]
    assert uploads["with"]["name"] == downloads["with"]["name"]
    assert "ddpperf.md" in uploads["with"]["path"]
    *_, uploads = every["jobs"]["perf"]["steps"]
    _, downloads, *_ = kept["jobs"]["history"]["steps"]
    assert uploads["with"]["name"] == downloads["with"]["name"]


def test_the_job_of_gitlab_can_be_read() -> None:
    job = recipe("gitlab/.gitlab/perf.yml")["perf"]
    assert job["script"][1].startswith(
        "python -m pytest tests/perf --ddp-world-size 8 "
    )
    assert job["artifacts"]["reports"]["junit"] in job["script"][1]


def test_the_job_of_slurm_is_a_shell_script() -> None:
    script = RECIPES / "slurm" / "perf.sbatch"
    subprocess.run(["bash", "-n", script], check=True)


def test_the_job_of_kubernetes_meets_at_its_own_service() -> None:
    text = (RECIPES / "kubernetes/perf-job.yaml").read_text(encoding="utf-8")
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert environment["PET_MASTER_ADDR"] == "perf-0.perf"
    assert environment["PET_NNODES"] == str(job["spec"]["completions"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


def test_every_command_that_measures_is_marked() -> None:
    for file in RECIPES.rglob("*perf*"):
        text = file.read_text(encoding="utf-8")
        measures = re.search("pytest,? tests/perf", text) is not None
        assert ("adapt" in text) == measures, file
