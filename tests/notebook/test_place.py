"""Where a notebook's runs survive: Drive, Kaggle, a folder, a URL, or nowhere, and then that is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from jackline import notebook
from jackline.errors import UsageError
from jackline.notebook import place
from jackline.notebook.place import saved_place


@pytest.fixture
def colab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[str], None]], Path]:
    """A machine that calls itself Colab; `mount` is what Colab does when it is asked for Drive."""
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr(place, "DRIVE", tmp_path / "drive")

    def with_mount(mount: Callable[[str], None]) -> Path:
        package, module, drive = ModuleType("google"), ModuleType("google.colab"), ModuleType("google.colab.drive")
        drive.mount = mount  # type: ignore[attr-defined]
        module.drive = drive  # type: ignore[attr-defined]
        package.colab = module  # type: ignore[attr-defined]
        for known in (package, module, drive):
            monkeypatch.setitem(sys.modules, known.__name__, known)
        return tmp_path / "drive"

    return with_mount


def test_drive_is_mounted_once_and_its_folder_is_remembered_for_the_next_kernel(
    colab: Callable[[Callable[[str], None]], Path], clean_environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def mount(point: str) -> None:
        asked.append(point)
        (Path(point) / "MyDrive").mkdir(parents=True)

    point = colab(mount)
    notebook.setup(save_to="drive:runs")
    notebook.setup(save_to="drive:runs")
    assert asked == [str(point)]
    assert saved_place(clean_environment) == str(point / "MyDrive" / "runs")
    assert list((point / "MyDrive" / "runs").iterdir()) == []
    assert capsys.readouterr().out.splitlines()[:4] == [
        f"[jackline] mounting Google Drive at {point}; Colab asks for your permission",
        f"[jackline] runs are in {clean_environment}",
        f"[jackline] checkpoints and records are copied to {point / 'MyDrive' / 'runs'} as they are made",
        "[jackline] after the machine is lost, running all cells again resumes from there",
    ]


def test_a_refused_drive_is_an_error_and_nothing_is_saved_elsewhere_instead(
    colab: Callable[[Callable[[str], None]], Path], clean_environment: Path
) -> None:
    def refuse(point: str) -> None:
        raise ValueError("mount failed\nand a long story")

    colab(refuse)
    with pytest.raises(UsageError) as caught:
        notebook.setup(save_to="drive:runs")
    assert str(caught.value) == (
        "error: Google Drive could not be mounted: mount failed\n"
        "hint: run the cell again and allow it; setup() without save_to continues without a second place"
    )
    assert saved_place(clean_environment) is None


def test_without_a_second_place_it_is_said_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, clean_environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    notebook.setup(save_to=tmp_path / "first")
    notebook.setup()
    assert saved_place(clean_environment) is None, "the last word counts"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "[jackline] nothing is copied elsewhere: when this machine is taken away (Colab: after 12 hours at most), "
        "every checkpoint on it is lost",
        "[jackline] hint: setup(save_to='drive:runs') on Colab, or a folder or URL that outlives the machine",
    ]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (
            "drive:runs",
            "error: save_to='drive:runs' means Google Drive, and this is not Colab\nhint: setup(save_to='/a/folder')",
        ),
        (
            "kaggle",
            "error: save_to='kaggle' means Kaggle's output, and this is not Kaggle\nhint: setup(save_to='/a/folder')",
        ),
        (
            "/proc/nothing",
            "error: cannot use /proc/nothing as a mirror: No such file or directory\nhint: name a folder or a URL",
        ),
    ],
)
def test_a_place_that_is_not_here_is_an_error_with_a_way_out(
    word: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError) as caught:
        notebook.setup(save_to=word)
    assert str(caught.value) == text


def test_a_folder_means_the_same_from_everywhere_and_a_url_is_kept_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_environment: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook.setup(save_to="saved")
    assert saved_place(clean_environment) == str(tmp_path / "saved")
    notebook.setup(save_to="memory://bucket/runs")
    assert saved_place(clean_environment) == "memory://bucket/runs"
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setattr(place, "KAGGLE", tmp_path / "working")
    notebook.setup(save_to="kaggle:runs")
    assert saved_place(clean_environment) == str(tmp_path / "working" / "runs")


def test_a_place_for_copies_that_came_with_somebodys_folder_is_not_used(
    clean_environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cloned repository may hold a runs folder: what is trained must not be copied to a place that it names."""
    clean_environment.mkdir(parents=True, exist_ok=True)
    (clean_environment / "notebook.json").write_text('{"save_to": "sftp://evil:secret-word@host/x"}')
    assert saved_place(clean_environment) is None
    said = capsys.readouterr().out
    assert "that you did not choose here" in said and "secret-word" not in said
    notebook.setup(save_to=tmp_path / "mine")
    assert saved_place(clean_environment) == str(tmp_path / "mine")
