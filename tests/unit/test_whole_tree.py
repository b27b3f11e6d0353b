"""What a worktree of a commit lacks of itself: submodules, files of Git LFS, what git ignores, and
where variables lead."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.records.errors import AgainstError
from pytest_ddpperf.remote import whole_tree
from pytest_ddpperf.remote.whole_tree import complete, move_variables
from pytest_ddpperf.remote.worktree import Checkout
from pytest_ddpperf.wire.inotify import FilesWatch
from pytest_ddpperf.wire.source_trees import Trees
from tests.git import git
from tests.unit.test_against import top, untouched
from tests.unit.test_git import commit
from tests.unit.test_machine import settings

__all__ = ["top"]

ALLOW = ("-c", "protocol.file.allow=always")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def nested(top: Path, tmp_path: Path) -> Path:
    """A repository with a submodule that has another one: at v2 both hold "1", today "2"."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    commit(inner, i="1")
    commit(outer, o="1")
    git(outer, *ALLOW, "submodule", "--quiet", "add", inner, "deep/inner")
    commit(outer)
    git(top, *ALLOW, "submodule", "--quiet", "add", outer, "third party/outer")
    update(top)
    commit(top)
    git(top, "tag", "v2")
    place = top / "third party/outer"
    commit(place / "deep/inner", i="2")
    commit(place, o="2")
    commit(top)
    # from here on they are nowhere else
    shutil.rmtree(inner)
    shutil.rmtree(outer)
    return top


def update(top: Path) -> None:
    words = ("submodule", "--quiet", "update", "--init", "--recursive")
    git(top, *ALLOW, *words)


class Version:
    """A version that is checked out, as long as the context lasts."""

    def __init__(self, top: Path, against: str = "v2", **asked: Any) -> None:
        self.checkout = Checkout(settings(against=against, **asked), top, ())

    def __enter__(self) -> Path:
        return Path(self.checkout.check_out().base)

    def __exit__(self, *_: object) -> None:
        self.checkout.remove()


def held(tree: Path) -> list[str]:
    outer = tree / "third party/outer"
    return [(outer / file).read_text() for file in ("o.py", "deep/inner/i.py")]


def test_submodules_are_checked_out_at_their_recorded_commits_from_the_repository_itself(
    nested: Path,
) -> None:
    with untouched(nested):
        with Version(nested) as tree:
            assert held(tree) == ["1", "1"]
        with Version(nested, "HEAD") as tree:
            assert held(tree) == ["2", "2"]
        with Version(nested, "v1") as tree:
            assert not (tree / "third party").exists()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_submodules_that_the_current_tree_no_longer_has_are_checked_out(
    nested: Path, is_renamed: bool
) -> None:
    if is_renamed:
        git(nested, "mv", "third party/outer", "moved")
    else:
        git(nested, "rm", "-rfq", "third party/outer")
    commit(nested)
    with Version(nested) as tree:
        assert held(tree) == ["1", "1"]


def test_a_submodule_that_is_empty_in_the_current_tree_is_so_on_both_sides(
    nested: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", nested, clone)
    with Version(clone) as tree:
        assert [*(tree / "third party/outer").iterdir()] == []


def test_submodules_are_untouched_where_git_goes_into_them_by_itself(
    nested: Path,
) -> None:
    outer = nested / "third party/outer"
    for repository in (nested, outer):
        git(repository, "config", "submodule.recurse", "true")
    inner = nested / "third party/outer/deep/inner"
    with untouched(nested), Version(nested) as tree:
        assert held(tree) == ["1", "1"]
    assert git(inner, "rev-parse", "--show-toplevel") == str(inner)
    assert git(nested, "status", "--porcelain") == ""


def test_a_submodule_that_a_sparse_tree_leaves_out_is_on_neither_side(
    nested: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-checkout", nested, clone)
    git(clone, "sparse-checkout", "set", "src")
    git(clone, "checkout", "--quiet")
    assert not (clone / "third party").exists()
    with Version(clone, "HEAD") as tree:
        assert (tree / "src/a.py").exists()
        assert not (tree / "third party").exists()
    # git keeps one that was there before
    git(nested, "sparse-checkout", "set", "src")
    assert held(nested) == ["2", "2"]
    with Version(nested) as tree:
        assert held(tree) == ["1", "1"]


def test_a_submodule_of_tests_need_not_be_in_the_clone_as_the_version_has_it(
    nested: Path,
) -> None:
    """Both sides have the current one."""
    place = nested / "third party/outer/deep/inner"
    kept = git(place, "rev-parse", "--absolute-git-dir")
    shutil.rmtree(place)
    shutil.rmtree(kept)
    commit(place, i="another history")
    assert "deep/inner" in refused(nested)
    checkout = Checkout(
        settings(against="v2"), nested, [str(nested / "third party")]
    )
    tree = Path(checkout.check_out().base)
    assert (tree / "third party/outer/deep/inner/i.py").read_text() == (
        "another history"
    )
    checkout.remove()


def refused(top: Path, against: str = "v2", **asked: Any) -> str:
    version = Version(top, against, **asked)
    with pytest.raises(AgainstError) as caught:
        version.checkout.check_out()
    version.checkout.remove()
    return caught.value.problem


def test_a_submodule_whose_commit_is_not_in_the_clone_is_named_unless_it_is_set_up(
    nested: Path, temporary: Path
) -> None:
    place = nested / "third party/outer/deep/inner"
    kept = git(place, "rev-parse", "--absolute-git-dir")
    shutil.rmtree(place)
    commit(place, i="another history")
    with Version(nested) as tree:
        assert held(tree) == ["1", "1"], "by what git kept"
    shutil.rmtree(kept)
    named = r"third party/outer/deep/inner (a submodule, or a file of Git LFS): fetch it"
    assert named in refused(nested)
    assert [*temporary.iterdir()] == []
    build = "echo built > 'third party/outer/deep/inner/i.py'"
    with Version(nested, against_setup=build) as tree:
        assert held(tree) == ["1", "built\n"]


def pointer(content: str) -> str:
    name = hashlib.sha256(content.encode()).hexdigest()
    version = "version https://git-lfs.github.com/spec/v1"
    return f"{version}\noid sha256:{name}\nsize {len(content)}\n"


def test_files_of_git_lfs_have_their_content_or_are_named(
    top: Path, temporary: Path
) -> None:
    """Git's own filter for them is not installed here, so the index has pointers."""
    (top / ".gitattributes").write_text("*.bin filter=lfs -text\n")
    (top / "model.bin").write_text(pointer("old"))
    (top / "other.bin").write_text(pointer("other"))
    commit(top)
    with Version(top, "HEAD") as tree:
        assert (tree / "model.bin").read_text() == pointer("old")
    (top / "model.bin").write_text("new")
    assert "has as model.bin (a submodule, or a file of" in refused(top, "HEAD")
    assert [*temporary.iterdir()] == []
    name = hashlib.sha256(b"old").hexdigest()
    content = top / ".git/lfs/objects" / name[:2] / name[2:4] / name
    content.parent.mkdir(parents=True)
    content.write_text("old")
    with untouched(top), Version(top, "HEAD") as tree:
        assert (tree / "model.bin").read_text() == "old"
        assert (tree / "other.bin").read_text() == pointer("other")


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_git_opens_no_file_of_a_new_worktree_to_show_changes(
    top: Path,
) -> None:
    with Version(top, "HEAD") as tree:
        watch = FilesWatch({tree / "src/a.py": "a"})
        git(tree, "describe", "--dirty", "--always")
        git(tree, "status")
        used = watch.used()
        watch.close()
    assert not used


def test_what_a_sparse_tree_leaves_out_is_on_neither_side(
    top: Path, temporary: Path
) -> None:
    git(top, "sparse-checkout", "set", "--no-cone", "/*", "!/src/")
    with Version(top, "HEAD") as tree:
        assert not (tree / "src").exists()
        git(tree, "sparse-checkout", "disable")  # as git before 2.36 has it
        assert (tree / "src/a.py").exists()
        trees = Trees(current=str(top), base=str(tree), kept=())
        assert complete(trees, git(top, "rev-parse", "HEAD")) == []
        assert not (tree / "src/a.py").exists()
        assert (tree / "tests/test_a.py").exists()


def test_what_submodules_ignore_is_linked_or_named(nested: Path) -> None:
    place = nested / "third party/outer"
    (place / ".gitignore").write_text("*.so\n*.dat\n")
    for file in ("fast.so", "deep.dat"):
        (place / file).write_text("built")
    version = Version(nested)
    with version as tree:
        there = tree / "third party/outer"
        assert (there / "deep.dat").read_text() == "built"
        assert not (there / "fast.so").exists()
        files = [f"third party/outer/{file}" for file in ("fast.so", "o.py")]
        lacking = version.checkout.lacking
        used = dict.fromkeys([*files, "src/a.py"], "digest")
        assert lacking(used) == files[:1]
        (there / "old.py").touch()
        (there / "old.so").touch()
        files = [f"third party/outer/{file}" for file in ("old.py", "old.so")]
        used = dict.fromkeys(files, "digest")
        assert lacking(used, are_current=False) == files[1:]


def test_large_ignored_folders_are_links_themselves(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted over all of them, by name."""
    (top / ".gitignore").write_text("data*\n")
    for folder, files in {"data1": 2, "data2": 4, "data3": 1}.items():
        (top / folder).mkdir()
        for number in range(files):
            (top / folder / str(number)).touch()
    (top / "data4").symlink_to(top / "data1")
    monkeypatch.setattr(whole_tree, "_TOO_MANY_FILES", 5)
    with Version(top, "HEAD") as tree:
        links = [each.name for each in tree.glob("data*") if each.is_symlink()]
        assert sorted(links) == ["data2", "data4"]
        assert len([*(tree / "data2").iterdir()]) == 4


def test_folders_that_git_ignores_are_as_old_in_the_version(top: Path) -> None:
    """So that code finds the same one to be the last."""
    (top / ".gitignore").write_text("runs/*\n!runs/.gitkeep\n")
    for age, name in enumerate(("run-b", "run-a", "run-c")):
        folder = top / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "model.pt").write_text(name)
        for each in (folder, folder.parent):
            os.utime(each, (1e9 - age, 1e9 - age))
    (top / "runs/.gitkeep").touch()
    commit(top)
    with Version(top, "HEAD") as tree:
        for path in (top / "runs").rglob("*"):
            there = tree / path.relative_to(top)
            if path.name != ".gitkeep":
                assert there.stat().st_mtime == path.stat().st_mtime


def test_empty_folders_are_in_the_version_too(top: Path) -> None:
    (top / "results/today").mkdir(parents=True)
    (top / "src/debug").mkdir()
    (top / "further").mkdir()
    (top / "further/new.py").touch()
    version = Version(top, "HEAD")
    with version as tree:
        assert (tree / "results/today").is_dir()
        assert (tree / "src/debug").is_dir()
        assert not (tree / "further").exists()
        assert git(tree, "status", "--porcelain") == ""


@pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK), reason="there is no such tmpfs"
)
def test_a_folder_lists_the_same_in_the_same_order_where_the_last_comes_first() -> (
    None
):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        here, there = Path(name, "here"), Path(name, "there")
        for number in (3, 1, 2):
            (here / f"folder{number}").mkdir(parents=True)
            (here / f"file{number}").write_text("1")
            for inner in (5, 4, 6):
                (here / f"folder{number}/{inner}").touch()
        whole_tree._mirror(here, there)
        assert os.listdir(there) == os.listdir(here)
        for number in (3, 1, 2):
            inside = f"folder{number}"
            assert os.listdir(there / inside) == os.listdir(here / inside)
        assert (there / "file3").is_symlink()


def test_ignored_caches_have_no_code_and_own_locks_in_the_version(
    top: Path,
) -> None:
    """What locks files opens no link, and each version has its own code."""
    (top / ".gitignore").write_text("cache\n*.lock\n")
    commit(top, src__b="1")
    for file in ("root.lock", "src/.lock"):
        (top / file).touch()
    cache = top / "cache/inner"
    cache.mkdir(parents=True)
    for file in ("a.lock", "LOCK", ".lock"):
        (cache / file).touch()
    os.utime(cache / "LOCK", (1, 1))
    (cache / "link").symlink_to("a.lock")
    for file in ("code.py", "a.bin", "poetry.lock"):
        (cache / file).write_text("1")
    with Version(top, "HEAD") as tree:
        there = tree / "cache/inner"
        links = [each.name for each in there.iterdir() if each.is_symlink()]
        assert sorted(links) == ["a.bin", "link", "poetry.lock"]
        for own in ("a.lock", "LOCK", ".lock"):
            assert (there / own).is_file()
        for own in (tree / "root.lock", tree / "src/.lock"):
            assert own.is_file()
            assert not own.is_symlink()
        assert (there / "LOCK").stat().st_mtime == 1
        assert not (there / "code.py").exists()


def test_ignored_data_has_its_folder_in_a_version_without_it(top: Path) -> None:
    (top / ".gitignore").write_text("*.npy\n")
    commit(top)
    (top / "data").mkdir()
    for file in ("x.npy", "notes"):
        (top / "data" / file).write_text("1")
    with Version(top, "HEAD") as tree:
        assert (tree / "data/x.npy").read_text() == "1"
        assert not (tree / "data/notes").exists()


def test_temporary_files_may_lie_in_the_repository(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / ".gitignore").write_text("tmp\n")
    commit(top)
    (top / "tmp").mkdir()
    (top / "tmp/data").touch()
    monkeypatch.setattr("tempfile.tempdir", str(top / "tmp"))
    with Version(top, "HEAD") as tree:
        assert [each.name for each in (tree / "tmp").iterdir()] == ["data"]


def test_what_only_the_version_has_although_git_ignores_it_is_named(
    top: Path,
) -> None:
    (top / ".gitignore").write_text("fast.so\n")
    commit(top)
    version = Version(top, "HEAD", against_setup="touch src/fast.so")
    with version as tree:
        (tree / "src/new.py").touch()
        files = dict.fromkeys(
            ("src/fast.so", "src/a.py", "src/new.py"), "digest"
        )
        lacking = version.checkout.lacking
        assert lacking(files, are_current=False) == ["src/fast.so"]
        assert lacking(files) == []


def test_variables_lead_into_the_versions_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(os.path.realpath(tmp_path)) / "a repo"
    (here / "venv/bin").mkdir(parents=True)
    link = here.parent / "link"
    link.symlink_to(here)
    (here / "active").symlink_to("small")
    monkeypatch.setattr(
        "pytest_ddpperf.wire.source_trees._PREFIXES", {str(here / "venv")}
    )
    trees = Trees(current=str(here), base="/t/a repo", kept=())
    moved = {
        f"{here}": "/t/a repo",
        f"{here}/data": "/t/a repo/data",
        f"{here}/data/": "/t/a repo/data/",
        f"{here}/active": "/t/a repo/active",
        f"{here}/a.bin,{here}/b.bin": "/t/a repo/a.bin,/t/a repo/b.bin",
        f"{link}/data": "/t/a repo/data",
        f"/usr/bin:{here}/tools": "/usr/bin:/t/a repo/tools",
        f"--model={here}/m.pt --n=1": "--model=/t/a repo/m.pt --n=1",
        f"sqlite:///{here}/x.db": "sqlite:////t/a repo/x.db",
        f"-O2 -I{here}/include -isystem{here}": "-O2 -I/t/a repo/include -isystem/t/a repo",
        f"-Wl,-rpath,{here}/lib -L{here},{here}": "-Wl,-rpath,/t/a repo/lib -L/t/a repo,/t/a repo",
        f"file://{here}": "file:///t/a repo",
    }
    same = [
        "",
        "word",
        "/usr/bin",
        str(here.parent),
        f"{here}2/data",
        f"{here}/../data",
        f"{here}/data/../../data",
        f"--data={here}/../data",
        f"-I/elsewhere{here}",
        f"{here}/venv",
        f"{here}/venv/bin:/bin",
    ]
    given = {str(k): value for k, value in enumerate([*moved, *same])}
    assert [*move_variables(trees, given).values()] == [*moved.values(), *same]
    temporary = {"TMPDIR": f"{here}/tmp"}
    assert move_variables(trees, temporary) == temporary, "of both sides"
    monkeypatch.chdir(here)
    assert move_variables(
        trees, {"TMPDIR": "tmp", "TEMP": "", "TMP": "/t/"}
    ) == {
        **temporary,
        "TEMP": "",
        "TMP": "/t/",
    }


def test_ignored_data_is_not_linked_through_a_link_of_the_version(
    top: Path, tmp_path: Path
) -> None:
    """It may lead to the user's own files."""
    outside = tmp_path / "datasets"
    outside.mkdir()
    (top / "data").symlink_to(outside)
    commit(top)
    (top / "data").unlink()
    (top / "data").mkdir()
    (top / "data/.gitkeep").touch()
    (top / ".gitignore").write_text("*.bin\n")
    (top / "data/train.bin").write_text("1")
    commit(top)
    with Version(top, "HEAD~1") as tree:
        assert (tree / "data").is_symlink()
    assert [*outside.iterdir()] == []
