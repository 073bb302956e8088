"""notebooks/colab_quickstart.ipynb, run as it is, and what is in it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.deadline import HANGS_S
from tests.shell import Shell

PATH = Path(__file__).parents[2] / "notebooks" / "colab_quickstart.ipynb"


def code_cells(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_notebook_has_five_cells_without_outputs_and_without_pasted_code() -> None:
    book = nbformat.read(PATH, as_version=4)
    nbformat.validate(book)
    cells = code_cells(book)
    assert len(cells) == 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    lines = [line for cell in cells for line in cell.source.splitlines() if line and not line.startswith("#")]
    assert lines == [
        '%pip install -q "jackline[train]"',
        "from jackline import notebook",
        'notebook.setup(save_to="drive:runs")',
        'notebook.plan("demo", quick=True)',
        'run = notebook.train("demo", quick=True)',
        "run.watch()",
        "run.why()",
    ]


@pytest.mark.zoo
def test_the_notebook_runs_from_the_first_cell_to_the_last(person: Shell, tmp_path: Path) -> None:
    """Only the place is another one, because there is no Drive here, and the quick run is quicker."""
    book = nbformat.read(PATH, as_version=4)
    for cell in code_cells(book):
        cell.source = cell.source.replace('"drive:runs"', repr(str(tmp_path / "saved")))
        cell.source = cell.source.replace(
            "quick=True", "quick=True, max_steps=10, full_eval=False, seq_len=16, batch_size=2"
        )
    how = {"metadata": {"path": str(person.work)}}
    client = NotebookClient(book, timeout=HANGS_S, kernel_name="python3", resources=how)
    client.execute(env={**person.env, "IPYTHONDIR": str(tmp_path / "ipython")})
    _install, setup, plan, train, why = map(printed, code_cells(book))
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
    (gpu,) = [output for output in code_cells(book)[3].outputs if output.output_type == "display_data"]
    assert ", at step 10\n" in gpu.data["text/plain"]
    assert why.startswith(f"run '{run.name}' finished at ")
    assert list((tmp_path / "saved" / run.name / "checkpoints").glob("step-00000010-*"))
