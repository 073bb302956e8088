"""`jackline report` as a person types it."""

from __future__ import annotations

from tests.shell import Shell


def test_the_command_writes_one_file_and_names_it(shell: Shell) -> None:
    assert shell.jackline("run", "--name", "said", "--", "sh", "-c", "echo hello; exit 3").code == 3
    done = shell.jackline("report", "said")
    assert done.code == 0, done
    assert done.out.startswith("said-report.html  ")
    page = (shell.work / "said-report.html").read_text()
    assert "exited with code 3" in page
    assert "## Post-mortem" in shell.jackline("report", "said", "--md", "--out", "-").out
    refused = shell.jackline("report", "said", "--out", str(shell.work))
    assert refused.code == 2
    assert "is a folder" in refused.err
