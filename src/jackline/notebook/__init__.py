"""Jackline in a notebook: five cells that start, watch and explain a run, and resume it after the machine was lost.

    from jackline import notebook
    notebook.setup(save_to="drive:runs")
    notebook.plan("demo", quick=True)
    run = notebook.train("demo", quick=True)
    run.watch()
    run.why()

A thin layer: every call is a `jackline` command or reads the run directory as `jackline status` does. The run has an
OS session of its own, so stopping a cell or restarting the kernel does not affect it. Works in plain Python too. Does
not import torch.
"""

from __future__ import annotations

from jackline.notebook.look import Run, report, watch, why
from jackline.notebook.place import setup
from jackline.notebook.start import plan, run, train

__all__ = ["Run", "plan", "report", "run", "setup", "train", "watch", "why"]
