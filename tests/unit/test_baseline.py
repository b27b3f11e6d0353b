import errno
import itertools
import json
import os
import re
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.baseline import store as store_module
from pytest_ddpperf.baseline.content import (
    environment,
    environment_name,
    file_name,
)
from pytest_ddpperf.records.errors import BaselineError
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    Baseline,
    Environment,
    Measurement,
    Recording,
    Samples,
    TestId,
)

CPU_FACTS = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "cuda": None,
    "driver": "",
    "cpu_model": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
    "cores": 2,
    "cores_per_rank": 1,
    "pinned": True,
    "host": "runner-1",
    "nodes": 1,
    "devices_per_node": 2,
    "matmul_precision": "highest",
    "deterministic": False,
    "power_limit_watts": None,
    "env:OMP_NUM_THREADS": "1",
    "xdist_workers": 0,
}
CPU_PLAN = Plan(world_size=2, backend="gloo", device="cpu", warmup=5)
GPU_FACTS = {
    **CPU_FACTS,
    "device_model": "NVIDIA H200",
    "device_memory_gib": 139.81,
    "mig_profile": None,
    "devices_per_node": 8,
    "power_limit_watts": 700.0,
    "interconnect": "nvlink",
    "implementation": "ProcessGroupNCCL",
    "cudnn_benchmark": False,
    "clock_mhz": 1755,
}
GPU_PLAN = Plan(
    world_size=8, backend="nccl", device="cuda", warmup=10, timing="free"
)
GPU_RPC_PLAN = replace(GPU_PLAN, parameter_servers=2, master=True)
CPU = environment(CPU_FACTS, CPU_PLAN, batch_size=32)
OTHERWISE = environment(CPU_FACTS, CPU_PLAN, batch_size=64)
TEST = TestId(module="tests/perf/test_step", name="test_a")
SAMPLES = Samples(
    step_seconds=((0.25, 0.5), (0.125, 1.0)),
    rank_seconds=(((0.25, 0.5), (0.2, 0.0)), ((0.125, 1.0), (0.1, 0.9))),
    cpu_seconds=(((0.2, 0.3), (0.0, 0.4)), ((0.1, 0.9), (0.1, 0.8))),
)


def baseline(
    samples=SAMPLES, environment=CPU, *, test=TEST, commits=("0" * 40,)
):
    """One session a commit, with the same figures."""
    measured = Measurement(samples=samples, environment=environment)
    sessions = [
        Recording(
            measurement=measured, created="2026-01-02T03:04:05Z", commit=commit
        )
        for commit in commits
    ]
    return Baseline(test=test, sessions=tuple(sessions))


BASELINE = baseline()
OTHER = baseline(commits=("1" * 40,))


@pytest.fixture
def store(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return Store(tmp_path / "baselines")


def files_below(folder):
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    )


# --- environments


def test_the_facts_of_a_cpu_are_sorted_into_three_classes():
    assert (
        Environment(
            key={
                "device_type": "cpu",
                "cpu_model": CPU_FACTS["cpu_model"],
                "cores": 2,
                "cores_per_rank": 1,
                "pinned": True,
                "backend": "gloo",
                "world_size": 2,
                "nodes": 1,
                "devices_per_node": 2,
            },
            must_match={
                "batch_size": 32,
                "warmup": 5,
                "timing": "step",
                "matmul_precision": "highest",
                "deterministic": False,
            },
            recorded={
                "python": "3.11.7",
                "torch": "2.13.0",
                "host": "runner-1",
                "env:OMP_NUM_THREADS": "1",
                "xdist_workers": 0,
                "steps": 1,
            },
        )
        == CPU
    )


def test_on_an_accelerator_the_device_is_the_key_and_the_cpu_is_recorded():
    gpu = environment(GPU_FACTS, GPU_RPC_PLAN, batch_size=None)
    assert gpu.key == {
        "device_type": "cuda",
        "device_model": "NVIDIA H200",
        "device_memory_gib": 140,
        "backend": "nccl",
        "world_size": 8,
        "nodes": 1,
        "devices_per_node": 8,
        "roles": "8 trainers 2 ps master",
    }
    assert gpu.must_match == {
        "warmup": 10,
        "timing": "free",
        "power_limit_watts": 700.0,
        "interconnect": "nvlink",
        "implementation": "ProcessGroupNCCL",
        "matmul_precision": "highest",
        "cudnn_benchmark": False,
        "deterministic": False,
    }
    assert gpu.recorded["cpu_model"] == CPU_FACTS["cpu_model"]
    assert gpu.recorded["clock_mhz"] == 1755
    assert "cuda" not in gpu.recorded, "a fact that is None is left out"


def test_that_each_rank_sees_its_device_alone_is_recorded():
    assert (
        "visible_devices"
        not in environment({}, GPU_PLAN, batch_size=None).recorded
    )
    plan = replace(GPU_PLAN, sees_one_device=True)
    recorded = environment({}, plan, batch_size=None).recorded
    assert recorded["visible_devices"] == "one a rank"


def test_a_composite_backend_has_a_folder_of_its_own():
    plan = replace(GPU_PLAN, backend="cpu:gloo,cuda:nccl")
    names = {
        environment_name(environment(GPU_FACTS, each, batch_size=None))
        for each in (plan, GPU_PLAN)
    }
    assert len(names) == 2
    assert any("cpu-gloo-cuda-nccl" in name for name in names)


@pytest.mark.parametrize(
    ("facts", "plan", "name"),
    [
        (
            CPU_FACTS,
            CPU_PLAN,
            "cpu-intel-xeon-platinum-8481c-cpu-2.70ghz-2-cores-1-per-rank-pinned-gloo-ws2-1x2",
        ),
        (
            {
                **CPU_FACTS,
                "cpu_model": "AMD EPYC",
                "cores_per_rank": 0,
                "pinned": False,
            },
            CPU_PLAN,
            "cpu-amd-epyc-2-cores-shared-unpinned-gloo-ws2-1x2",
        ),
        (GPU_FACTS, GPU_PLAN, "cuda-nvidia-h200-140gib-nccl-ws8-1x8"),
        (
            {**GPU_FACTS, "mig_profile": "1g.18gb", "nodes": 2},
            GPU_RPC_PLAN,
            "cuda-nvidia-h200-140gib-mig-1g.18gb-nccl-ws8-2x8-8-trainers-2-ps-master",
        ),
        (
            {},
            Plan(world_size=1, backend="gloo", device="mps"),
            "mps-gloo-ws1-1x1",
        ),
    ],
)
def test_the_folder_of_an_environment_says_its_key(facts, plan, name):
    assert environment_name(environment(facts, plan, batch_size=None)) == name


@pytest.mark.parametrize("other", ["AMD EPYC µ", "AMD EPYC /", "AMD EPYC" * 20])
def test_an_environment_name_that_lost_something_has_a_hash_of_the_key(other):
    def name(**facts):
        return environment_name(
            environment({**CPU_FACTS, **facts}, CPU_PLAN, batch_size=None)
        )

    assert re.fullmatch(
        r"cpu-amd-epyc[a-z0-9.-]*-[0-9a-f]{8}", name(cpu_model=other)
    )
    assert len(name(cpu_model=other)) <= 100
    assert name(cpu_model=other) != name(cpu_model=other + "!")


# --- names of files


@pytest.mark.parametrize(
    ("name", "label", "file"),
    [
        ("test_a", "", "test_a.json"),
        ("test_a[ws-x]", "", "test_a-ws-x.json"),
        ("test_a[2-0.5-_]", "", "test_a-2-0.5-_.json"),
        ("testa::test_b[x]", "", "testa.test_b-x.json"),
        ("test_a[x]", "forward", "test_a-x+forward.json"),
        ("test_a", "a-b", "test_a+a-b.json"),
    ],
)
def test_a_plain_name_is_its_own_file_name(name, label, file):
    assert file_name(TestId(module="m", name=name, label=label)) == file


LOSSY = [
    "test_A",
    "TestA::test_b",
    "testA::test_b",
    "test_a[X]",
    "test_a[x y]",
    "test_a[x/y]",
    "test_a[x+y]",
    "test_a[]",
    "test_a[x]y",
    "test_a[[x]]",
    "test_é",
    "test_a[../../etc/passwd]",
    "test_a[\0]",
    "..",
    "/",
    "",
    "\ud800",
    'test_a[CON:<>|?*"]',
    "x" * 101,
    "x" * 102,
    "test_a[" + "é" * 300 + "]",
]


@pytest.mark.parametrize("name", LOSSY, ids=range(len(LOSSY)))
@pytest.mark.parametrize("label", ["", "../x", "a+b", "É"])
def test_a_name_that_lost_anything_has_a_hash_and_stays_in_its_folder(
    store, name, label
):
    file = file_name(TestId(module="m", name=name, label=label))
    assert re.fullmatch(r"([a-z0-9._+-]{1,91}-)?[0-9a-f]{8}\.json", file)
    path = store.path(CPU, TestId(module="m", name=name, label=label))
    assert path.parent == store.root / environment_name(CPU) / "m"


def test_no_two_names_share_a_file():
    names = [
        *LOSSY,
        "test_a",
        "test_b",
        "a::b",
        "a.b",
        "a[b]",
        "a-b",
        "a[-b]",
        "a[b-c]",
        "a[b]",
        "test_a[x]",
        "a::b[c]",
        "x" * 100,
    ]
    ids = {
        TestId(module="m", name=name, label=label)
        for name in names
        for label in ("", "b", "b-c", "é")
    }
    files = [file_name(test) for test in ids]
    assert len(set(files)) == len(ids)
    assert len({file.lower() for file in files}) == len(ids), (
        "also where case does not count"
    )


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/../../../x", "a/\0/x", "", "."]
)
def test_no_module_leads_out_of_the_store(store, name):
    path = store.path(CPU, TestId(module=name, name="test_a"))
    assert Path(os.path.normpath(path)) == path
    assert path.is_relative_to(store.root / environment_name(CPU))
    assert len(path.relative_to(store.root / environment_name(CPU)).parts) >= 2


# --- saving and reading


def test_what_is_saved_is_read_back(store):
    path = store.write(BASELINE)
    assert path == store.path(CPU, TEST)
    assert store.read(CPU, TEST) == BASELINE


def test_any_test_id_can_be_saved_and_read(store):
    for name, label in itertools.product(LOSSY, ["", "../é\ud800"]):
        baseline = replace(
            BASELINE, test=TestId(module="tests/../é", name=name, label=label)
        )
        store.write(baseline)
        assert store.read(CPU, baseline.test) == baseline


def test_the_documented_file_is_what_is_written(store):
    page = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    test = TestId(module="tests/perf/test_step", name="test_train[bf16]")
    environment = Environment(
        **json.loads(text)["sessions"][0]["measurement"]["environment"]
    )
    path = store.path(environment, test)
    assert path.relative_to(store.root).as_posix() in page
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert store.write(store.read(environment, test)).read_text() == text


def test_saving_replaces_and_leaves_one_file_and_the_usual_permissions(store):
    store.write(OTHER)
    path = store.write(BASELINE)
    assert files_below(store.root) == [path.relative_to(store.root).as_posix()]
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_lock_that_stays_taken_is_told_and_nothing_is_written(
    store, monkeypatch
):
    store.write(BASELINE)
    (lock,) = (store.root.parent / "tmp").rglob("*.lock")
    monkeypatch.setattr(store_module, "_LOCK_WAIT_SECONDS", 0.01)
    with filelock.FileLock(lock), pytest.raises(BaselineError) as caught:
        store.write(OTHER)
    assert str(lock) in str(caught.value)
    assert "another run is saving here: wait until it ends" in str(caught.value)
    assert store.read(CPU, TEST) == BASELINE


def spoil(path, how):
    """Puts something into the place of a folder for locks, as another user might."""
    if how == "file":
        path.touch()
    elif how == "link":
        (path.parent.parent / "target").mkdir(exist_ok=True)
        path.symlink_to(path.parent.parent / "target")
    else:
        if os.geteuid():
            pytest.skip("only root gives folders to others")
        path.mkdir(mode=0o755)
        os.chown(path, 12345, 12345)


@pytest.mark.parametrize("how", ["file", "link", "others"])
def test_a_lock_folder_that_others_spoilt_is_not_used(store, how):
    store.write(BASELINE)
    (lock,) = (store.root.parent).rglob("*.lock")
    own = lock.parent
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.rename(own.with_name("away"))
    spoil(own, how)
    with pytest.raises(BaselineError) as caught:
        store.write(OTHER)
    assert (
        caught.value.problem
        == f"cannot be written: [Errno 17] belongs to another user or is not a folder: '{own}'"
    )
    assert (
        caught.value.remedy
        == f"remove {own} as its owner, or set TMPDIR to another folder"
    )
    assert store.read(CPU, TEST) == BASELINE


# --- files that cannot be read


def refusal(store, environment=CPU, test=TEST):
    with pytest.raises(BaselineError) as caught:
        store.read(environment, test)
    assert caught.value.path == store.path(environment, test)
    assert str(caught.value).startswith(f"baseline {caught.value.path}: ")
    return caught.value


def edit(path, *place, to):
    data = json.loads(path.read_text())
    inner = data
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = to
    del data["checksum"]  # as of a file from before there was one
    path.write_text(json.dumps(data))


RECORD_AGAIN = "restore it with git checkout, or delete it and run with --ddp-save-baseline"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (
            b'{"schema": 1, "test": {',
            "is not JSON, or not all of it: Expecting property name",
        ),
        (
            b"<<<<<<< HEAD\n{}\n",
            "is not JSON, or not all of it: Expecting value: line 1 column 1",
        ),
        (b"\xff\xfe\x00", "is not JSON, or not all of it: "),
        (b"[" * 200_000, "is not JSON, or not all of it: "),
        (b"9" * 5000, None),
        (
            b'{"schema": NaN}',
            "is not JSON, or not all of it: NaN is not a number",
        ),
        (
            b'{"schema": 1e999}',
            "is not JSON, or not all of it: 1e999 is not a number",
        ),
        (b"[]", "is not a baseline: its schema is None, not a version number"),
        (b"{}", "is not a baseline: its schema is None, not a version number"),
        (
            b'{"schema": "1"}',
            "is not a baseline: its schema is '1', not a version number",
        ),
        (
            b'{"schema": true}',
            "is not a baseline: its schema is True, not a version number",
        ),
        (
            b'{"schema": 0}',
            "is not a baseline: its schema is 0, not a version number",
        ),
        (b'{"schema": 1}', "object missing required field `test`"),
        (
            b'{"schema": 1, "test": {}, "sessions": [1]}',
            "test: object missing required field `module`",
        ),
    ],
    ids=range(16),
)
def test_a_file_that_is_no_baseline_is_an_error_that_names_it(
    store, content, problem
):
    store.write(BASELINE).write_bytes(content)
    error = refusal(store)
    assert error.problem.startswith(problem or "is not ")
    assert error.remedy == RECORD_AGAIN


def test_a_truncated_file_is_never_half_a_baseline(store):
    path = store.write(BASELINE)
    whole = path.read_bytes()
    for length in range(1, len(whole) - 2, 7):
        path.write_bytes(whole[:length])
        assert "is not JSON, or not all of it" in refusal(store).problem


def test_a_newer_schema_asks_for_an_upgrade(store):
    edit(store.write(BASELINE), "schema", to=2)
    error = refusal(store)
    assert (
        error.problem
        == "has schema 2; this version of pytest-ddpperf reads schema 1"
    )
    assert error.remedy.startswith("upgrade pytest-ddpperf")


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (
            ("step_seconds", 0, 1),
            "x",
            ".step_seconds[0][1]: expected `float`, got `str`",
        ),
        (
            ("step_seconds", 0, 1),
            0,
            ".step_seconds[0][1]: 0.0 is not a positive duration",
        ),
        (
            ("step_seconds", 1, 0),
            -1,
            ".step_seconds[1][0]: -1.0 is not a positive duration",
        ),
        (("step_seconds", 1), [0.1], ".step_seconds[1]: 1 steps, not 2"),
        (("step_seconds",), [], ".step_seconds: no steps"),
        (("step_seconds",), [[], []], ".step_seconds: no steps"),
        (
            ("step_seconds",),
            [[1.0, 1.0]],
            ".step_seconds: a single launch, with which nothing can be compared",
        ),
        (
            ("step_seconds",),
            [[1.0, 1.0]] * 3,
            ".rank_seconds: 2 launches, not 3",
        ),
        (("rank_seconds",), [[], []], ".cpu_seconds[0]: 2 ranks, not 0"),
        (("rank_seconds",), [], ".rank_seconds: 0 launches, not 2"),
        (("rank_seconds", 1), [[1.0, 1.0]], ".rank_seconds[1]: 1 ranks, not 2"),
        (("rank_seconds", 0, 1), [1.0], ".rank_seconds[0][1]: 1 steps, not 2"),
        (
            ("rank_seconds", 0, 1, 0),
            -0.5,
            ".rank_seconds[0][1][0]: -0.5 is negative",
        ),
        (("cpu_seconds", 0), [[1.0, 1.0]], ".cpu_seconds[0]: 1 ranks, not 2"),
        (
            ("examples",),
            [[[1, 1], [1, -2]]] * 2,
            ".examples[0][1][1]: -2 is negative",
        ),
    ],
)
def test_samples_edited_to_nonsense_are_named_by_their_place(
    store, place, value, problem
):
    edit(
        store.write(BASELINE),
        "sessions",
        0,
        "measurement",
        "samples",
        *place,
        to=value,
    )
    error = refusal(store)
    assert error.problem == "sessions[0].measurement.samples" + problem
    assert error.remedy == RECORD_AGAIN


def test_a_file_that_was_edited_by_hand_is_refused_unless_the_test_was_renamed(
    store,
):
    path = store.write(BASELINE)
    text = path.read_text()
    whole = json.loads(text)
    samples = whole["sessions"][0]["measurement"]["samples"]
    for table in ("step_seconds", "rank_seconds"):
        samples[table] = json.loads(
            json.dumps(samples[table]), parse_float=lambda n: float(n) * 3
        )
    path.write_text(json.dumps(whole))
    error = refusal(store)
    assert error.problem == "sessions: were edited after they were measured"
    assert error.remedy.startswith("restore it with git checkout")
    data = json.loads(text)
    data["new_field"] = "of a later version"
    path.write_text(json.dumps(data))
    assert store.read(CPU, TEST) == BASELINE, "however it is laid out"
    del data["checksum"]
    path.write_text(json.dumps(data))
    assert store.read(CPU, TEST) == BASELINE, "of before there were checksums"


def test_the_baseline_of_another_test_is_refused(store):
    other = replace(TEST, name="test_b", label="forward")
    path = store.write(BASELINE)
    path.rename(store.path(CPU, other))
    error = refusal(store, test=other)
    assert (
        error.problem
        == "belongs to tests/perf/test_step::test_a, not to tests/perf/test_step::test_b (forward)"
    )
    assert 'if the test was renamed, correct "test" in the file' in error.remedy


def test_the_baseline_of_another_environment_is_refused(store):
    other = replace(CPU, key={**CPU.key, "world_size": 4, "roles": "ps=1"})
    path = store.write(BASELINE)
    store.path(other, TEST).parent.mkdir(parents=True)
    path.rename(store.path(other, TEST))
    error = refusal(store, environment=other)
    assert (
        error.problem
        == "belongs to another environment: roles None, here 'ps=1', world_size 2, here 4"
    )
    assert error.remedy == RECORD_AGAIN


def failing(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code), str(args[0]))

    return fail


REMEDY = "make that possible, or name another folder with --ddp-baseline-dir"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_file_that_may_not_be_read_is_an_error_not_a_missing_baseline(
    store, monkeypatch, code
):
    path = store.write(BASELINE)
    monkeypatch.setattr(Path, "read_bytes", failing(code))
    error = refusal(store)
    assert (
        error.problem
        == f"cannot be read: [Errno {code}] {os.strerror(code)}: '{path}'"
    )
    assert error.remedy == REMEDY


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "mkdir"])
@pytest.mark.parametrize(
    "code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT]
)
def test_a_save_that_fails_leaves_the_old_baseline_and_no_other_file(
    store, monkeypatch, call, code
):
    path = store.write(BASELINE)
    with monkeypatch.context() as patch:
        if call == "open":
            patch.setattr("builtins.open", failing(code))
        elif call == "mkdir":
            mkdir = Path.mkdir  # filelock's too
            fails = failing(code)

            def below(path: Path, **how: Any) -> None:
                (fails if path.is_relative_to(store.root) else mkdir)(
                    path, **how
                )

            patch.setattr(Path, "mkdir", below)
        else:
            patch.setattr(os, call, failing(code))
        with pytest.raises(BaselineError) as caught:
            store.write(OTHER)
    assert caught.value.path == path
    assert caught.value.problem.startswith(
        f"cannot be written: [Errno {code}] {os.strerror(code)}"
    )
    assert caught.value.remedy == REMEDY
    assert store.read(CPU, TEST) == BASELINE
    assert files_below(store.root) == [path.relative_to(store.root).as_posix()]


def test_an_interrupt_while_saving_leaves_the_old_baseline_and_no_other_file(
    store, monkeypatch
):
    def interrupt(*args):
        raise KeyboardInterrupt

    path = store.write(BASELINE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.write(OTHER)
    assert store.read(CPU, TEST) == BASELINE
    assert files_below(store.root) == [path.relative_to(store.root).as_posix()]
    store.write(OTHER)  # the lock is free again


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        (
            replace(SAMPLES, step_seconds=((0.1, float("nan")), (0.1, 0.1))),
            "cannot be saved: a number is not finite",
        ),
        (
            # 0 once rounded
            replace(SAMPLES, step_seconds=((0.1, 2e-10), (0.1, 0.1))),
            (
                "cannot be saved: sessions[0].measurement.samples.step_seconds[0][1]: 0.0 is not a"
                " positive duration"
            ),
        ),
        (
            replace(SAMPLES, step_seconds=((0.1, -0.1), (0.1, 0.1))),
            (
                "cannot be saved: sessions[0].measurement.samples.step_seconds[0][1]: -0.1 is not a"
                " positive duration"
            ),
        ),
    ],
)
def test_figures_that_could_not_be_read_back_are_not_saved(
    store, samples, problem
):
    store.write(BASELINE)
    with pytest.raises(BaselineError) as caught:
        store.write(baseline(samples))
    assert caught.value.problem == problem
    assert caught.value.remedy == "nothing was written; measure again"
    assert store.read(CPU, TEST) == BASELINE


# --- sessions


def commits(stored):
    return [session.commit for session in stored.sessions]


def test_extending_adds_a_session_and_saving_replaces_them_all(store):
    store.write(baseline(commits=["a"]), extend=True)
    store.write(baseline(commits=["b"]), extend=True)
    assert commits(store.read(CPU, TEST)) == ["a", "b"]
    store.write(baseline(commits=["c"]))
    assert commits(store.read(CPU, TEST)) == ["c"]


def test_the_latest_sessions_are_kept(store):
    for number in range(12):
        store.write(baseline(commits=[str(number)]), extend=True)
    kept = [str(number) for number in range(2, 12)]
    assert commits(store.read(CPU, TEST)) == kept


def test_sessions_that_were_measured_otherwise_do_not_mix(store):
    store.write(BASELINE)
    with pytest.raises(
        BaselineError,
        match="was measured under other conditions: batch_size 32, here 64",
    ) as caught:
        store.write(baseline(environment=OTHERWISE), extend=True)
    assert (
        caught.value.remedy
        == "measure as before, or replace it with --ddp-save-baseline"
    )
    with pytest.raises(
        BaselineError, match="was measured under other conditions"
    ):
        store.read_alike(OTHERWISE, TEST)
    assert store.read_alike(CPU, TEST) == BASELINE
    assert store.read_alike(OTHERWISE, replace(TEST, name="test_b")) is None
    assert store.read(CPU, TEST) == BASELINE


# --- near misses


def test_the_other_environments_that_have_a_baseline_are_named(store):
    four, eight = (
        replace(CPU, key={**CPU.key, "world_size": size}) for size in (4, 8)
    )
    store.write(BASELINE)
    store.write(baseline(environment=four))
    store.write(baseline(environment=eight, test=replace(TEST, name="test_b")))
    (store.root / "README.md").write_text("a file beside the folders")
    assert store.others(TEST) == tuple(
        sorted([environment_name(CPU), environment_name(four)])
    )
    assert store.others(replace(TEST, label="forward")) == ()


def test_counters_hold_on_other_machines_for_the_same_work(store):
    there = replace(CPU, key={**CPU.key, "cpu_model": "another"})
    store.write(saved := baseline(environment=there))
    assert store.read_counted(CPU, TEST) == (
        environment_name(there),
        *saved.measurements,
    )
    newer = replace(CPU, key={**CPU.key, "cpu_model": "zzz"})
    (session,) = baseline(environment=newer).sessions
    store.write(
        Baseline(
            test=TEST,
            sessions=(replace(session, created="2099-01-01T00:00:00Z"),),
        )
    )
    assert store.read_counted(CPU, TEST)[0] == environment_name(newer)
    store.path(newer, TEST).write_text("{")
    with pytest.raises(BaselineError):
        store.read_counted(CPU, TEST)
    store.path(newer, TEST).unlink()
    assert store.read_counted(OTHERWISE, TEST) is None
    assert (
        store.read_counted(replace(CPU, key={**CPU.key, "world_size": 4}), TEST)
        is None
    )
    assert (
        store.read_counted(
            replace(CPU, must_match={**CPU.must_match, "timing": "free"}), TEST
        )
        is not None
    )
    assert (
        store.read_counted(
            replace(CPU, must_match={**CPU.must_match, "test:bucket_mb": 1}),
            TEST,
        )
        is None
    )


def test_without_a_store_there_are_no_others(store):
    assert store.others(TEST) == ()


@pytest.mark.parametrize(
    ("saved_from", "there", "module", "root"),
    [
        ("svc", "tests/test_a", "svc/tests/test_a", None),
        ("", "svc/tests/test_a", "tests/test_a", None),
        ("svc", "tests/test_a", "svc/tests/test_a", "base"),
        ("", "old/test_a", "new/test_a", None),
    ],
    ids=["below", "above", "in one store", "moved"],
)
def test_a_baseline_of_the_same_test_by_another_path_or_rootdir_is_found(
    tmp_path, saved_from, there, module, root
):
    def store_of(rootdir):
        return Store(
            tmp_path / root if root else rootdir / "baselines", rootdir
        )

    saving = tmp_path / saved_from
    file = store_of(saving).write(
        baseline(test=TestId(module=there, name="test_step"))
    )
    store = store_of(tmp_path / "svc" if "svc" in there else tmp_path)
    assert store.read(CPU, TestId(module=module, name="test_step")) is None
    assert store.nearby(CPU, TestId(module=module, name="test_step")) == file
    assert store.nearby(CPU, TestId(module=module, name="test_other")) is None
    assert store.nearby(CPU, TestId(module="test_b", name="test_step")) is None


def test_another_machine_counts_no_memory_and_another_backend_or_role_nothing(
    store,
):
    there = replace(CPU, key={**CPU.key, "cpu_model": "another"})
    (session,) = baseline(environment=there).sessions
    counters = {"all_reduce.bytes": 8, "peak_memory.bytes": 100}
    counted = replace(session.measurement, counters=counters)
    sessions = (replace(session, measurement=counted),)
    store.write(replace(BASELINE, sessions=sessions))
    assert store.read_counted(CPU, TEST)[1].counters == {"all_reduce.bytes": 8}
    for name in ("backend", "roles"):
        here = replace(CPU, key={**CPU.key, name: "another"})
        assert store.read_counted(here, TEST) is None


def test_the_network_cudnns_flag_and_tracing_must_match():
    facts = {
        "network": "InfiniBand",
        "cudnn_deterministic": True,
        "traced": True,
    }
    found = environment({**GPU_FACTS, **facts}, GPU_PLAN, batch_size=None)
    assert found.must_match.items() >= facts.items()
