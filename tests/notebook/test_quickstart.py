"""notebooks/*.ipynb, run as they are, and what is in them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jackline.trainer.recipe import RECIPES
from tests.deadline import HANGS_S
from tests.shell import Shell

FOLDER = Path(__file__).parents[2] / "notebooks"
QUICKSTART = FOLDER / "colab_quickstart.ipynb"
INSTALL = '%pip install -q "jackline[train] @ git+https://github.com/jackline-dev/jackline"'
# What makes the quick trial of a recipe quicker still: a few steps, no rehearsal of the memory.
FEW_STEPS = {
    "sparsae": "max_steps=3, full_eval=False, rehearse=False, seq_len=32, batch_size=2",
    "slimpajama": "max_steps=3, rehearse=False",
    "m7c": "max_steps=3, full_eval=False, rehearse=False, batch_size=2",
    "agab": "max_steps=6, full_eval=False, rehearse=False",
}


def code_cells(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def execute(book: nbformat.NotebookNode, person: Shell, tmp_path: Path, quick: str) -> list[nbformat.NotebookNode]:
    """Only the place is another one, because there is no Drive here, and the quick run is quicker."""
    for cell in code_cells(book):
        cell.source = cell.source.replace(INSTALL, '%pip install -q "jackline[train]"')  # there is no network
        cell.source = cell.source.replace('"drive:runs"', repr(str(tmp_path / "saved")))
        cell.source = cell.source.replace("quick=True", f"quick=True, {quick}")
    how = {"metadata": {"path": str(person.work)}}
    client = NotebookClient(book, timeout=HANGS_S, kernel_name="python3", resources=how)
    client.execute(env={**person.env, "IPYTHONDIR": str(tmp_path / "ipython")})
    return code_cells(book)


def test_the_notebook_has_five_cells_without_outputs_and_without_pasted_code() -> None:
    book = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(book)
    cells = code_cells(book)
    assert len(cells) == 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    lines = [line for cell in cells for line in cell.source.splitlines() if line and not line.startswith("#")]
    assert lines == [
        INSTALL,
        "from jackline import notebook",
        'notebook.setup(save_to="drive:runs")',
        'notebook.plan("demo", quick=True)',
        'run = notebook.train("demo", quick=True)',
        "run.watch()",
        "run.why()",
    ]


def test_every_recipe_has_a_notebook_without_outputs_and_without_pasted_code() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {"colab_quickstart", *RECIPES} - {"demo"}
    for name in FEW_STEPS:
        book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        nbformat.validate(book)
        cells = code_cells(book)
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
        lines = [line for cell in cells for line in cell.source.splitlines() if line and not line.startswith("#")]
        assert lines == [
            INSTALL,
            "from jackline import notebook",
            'notebook.setup(save_to="drive:runs")',
            f'run = notebook.train("{name}", quick=True)',
            "run.watch()",
            "notebook.report(run)",
        ]


@pytest.mark.zoo
def test_the_notebook_runs_from_the_first_cell_to_the_last(person: Shell, tmp_path: Path) -> None:
    book = nbformat.read(QUICKSTART, as_version=4)
    cells = execute(book, person, tmp_path, "max_steps=10, full_eval=False")
    _install, setup, plan, train, why = map(printed, cells)
    assert setup == (
        f"[jackline] runs are in {person.runs}\n"
        f"[jackline] checkpoints and records are copied to {tmp_path / 'saved'} as they are made\n"
        "[jackline] after the machine is lost, running all cells again resumes from there\n"
    )
    assert "verdict: recipe 'demo' is ready" in plan
    assert "ok      memory " in plan and "ok      saving " in plan and "ok      time " in plan
    (run,) = [path for path in person.runs.iterdir() if path.is_dir()]
    assert f"[jackline] run '{run.name}' started (attempt 1): {run}\n" in train
    assert train.endswith(f"[jackline] run '{run.name}' has finished\n")
    (gpu,) = [output for output in cells[3].outputs if output.output_type == "display_data"]
    assert ", at step 10\n" in gpu.data["text/plain"]
    assert why.startswith(f"run '{run.name}' finished at ")
    assert list((tmp_path / "saved" / run.name / "checkpoints").glob("step-00000010-*"))


# The quickstart, which trains the demo, and the quickest of the others belong to every run of the tests.
@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "agab" else pytest.mark.slow) for name in sorted(FEW_STEPS)]
)
def test_the_notebook_of_a_recipe_trains_and_shows_its_report(name: str, person: Shell, tmp_path: Path) -> None:
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    _install, _setup, train, report = execute(book, person, tmp_path, FEW_STEPS[name])
    (run,) = [path for path in person.runs.iterdir() if path.is_dir()]
    assert printed(train).endswith(f"[jackline] run '{run.name}' has finished\n")
    (shown,) = [output for output in report.outputs if output.output_type == "display_data"]
    assert shown.data["text/html"].startswith('<iframe sandbox="" srcdoc="')
    text = (person.work / f"{run.name}-report.html").read_text()
    assert f"{run.name}: finished" in text and "<svg" in text
    assert list((tmp_path / "saved" / run.name / "checkpoints").glob("step-*"))
