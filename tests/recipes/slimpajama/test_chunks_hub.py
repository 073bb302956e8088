"""A stream from the hub continues at the commit it was begun with, whatever was uploaded since."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.data.test_hub import SHA, Hub, hub
from tests.deadline import HANGS_S

__all__ = ["hub"]
NEWER = "fedcba9876543210fedcba9876543210fedcba98"
CHILD = """
import json, sys
from jackline.data.sources.bytefile import Patience
from jackline.data.loader.live import open_live
from jackline.data.spec import DataSpec, Source
from jackline.recipes.slimpajama.chunks import ChunkLoader, ChunkSettings, ChunkSource
from jackline.trainer.report.console import Console
state, count = json.loads(sys.argv[1]), int(sys.argv[2])
spec = DataSpec((Source("hf://datasets/some/set/data/**/*.jsonl"),), tokenizer="bytes")
console = Console()
console.say = lambda *words: None
loader = ChunkLoader(ChunkSource(open_live(spec, Patience(), lambda text: None), console), ChunkSettings(16, 4))
if state:
    loader.seek(state)
chunks = [next(loader).tokens.tolist() for _ in range(count)]
print(json.dumps([chunks, loader.state()]))
"""


def read(hub: Hub, folder: Path, state: dict[str, Any], count: int) -> tuple[list[Any], dict[str, Any]]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HOME": str(folder)}
    command = [sys.executable, "-c", CHILD, json.dumps(state), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    chunks, after = json.loads(done.stdout)
    return chunks, after


def test_a_stream_from_the_hub_resumes_at_its_commit(hub: Hub, tmp_path: Path) -> None:
    whole, _ = read(hub, tmp_path, {}, 24)
    first, state = read(hub, tmp_path, {}, 10)
    assert state["urls"] == [f"hf://datasets/some/set@{SHA}/data/**/*.jsonl"]
    hub.newest = NEWER
    rest, after = read(hub, tmp_path, state, 14)
    assert first + rest == whole
    assert after["urls"] == state["urls"]
    assert f"@{SHA}/" in after["cursor"]["sources"][0][0]
