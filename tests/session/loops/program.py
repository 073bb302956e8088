"""Trains one shape: `program.py NAME`."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.session.loops.table import MODULES, SHAPES, Go

for module in MODULES:
    importlib.import_module(module)
if __name__ == "__main__":
    SHAPES[sys.argv[1]].train(Go())
