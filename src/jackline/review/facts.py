"""What a run was made of, as named values: command, settings, code, data, packages, machine. Read from its folder."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jackline.review.rewinds import read_rewinds
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_text
from jackline.rundir.layout import RunDir
from jackline.rundir.records.surroundings import read_surroundings
from jackline.rundir.run_file import DamagedRun, read_run_file

MAX_CONFIG_BYTES = 1 << 16
MAX_NESTED = 1000  # marks that open a list or a mapping: the trainer writes a few
MAX_VALUES = 2000
_ALIAS = re.compile(r"(?m)(?:^|[:,\[{?-])\s*\*\w")
Facts = dict[str, dict[str, str]]  # section -> name -> value
SECTIONS = ("command", "settings", "code", "data", "training", "rewinds", "packages", "machine")


def read_facts(run: RunDir) -> Facts:
    """Every section is there; one about which nothing is known is empty."""
    found: Facts = {section: {} for section in SECTIONS}
    try:
        contents = read_run_file(run)
    except (DamagedRun, OSError):
        contents = None
    if contents is not None:
        found["command"] = parse_command(_without_folder(contents.argv))
        found["machine"] = _flat({**contents.machine, "host": contents.host})
        found["code"] = _flat(_code(contents.git))
        found["packages"] = {"python": str(contents.versions.get("python", ""))}
    _add_attempt(found, run)
    found["settings"] = _read_config(run.config_file)
    _add_checkpoint(found, run)
    found["rewinds"] = _rewinds(run)
    return found


def _rewinds(run: RunDir) -> dict[str, str]:
    """What was decided on the way: a run without any differs from one that went back."""
    told = read_rewinds(run)
    batches = ", ".join(one.batches for one in told if one.batches)
    found = {"batches left out": batches} if batches else {}
    times: Counter[int] = Counter()
    for one in told:
        if one.to_step is not None:
            times[one.to_step] += 1
            again = f" ({times[one.to_step]})" if times[one.to_step] > 1 else ""
            found[f"went back to step {one.to_step}{again}"] = one.origin
    return found


def _without_folder(argv: tuple[str, ...]) -> tuple[str, ...]:
    """A recipe's command names the run's own folder, which is another one for every run."""
    return (*argv[:3], *argv[4:]) if argv[1:3] == ("-m", "jackline.trainer") else argv


def parse_command(argv: tuple[str, ...]) -> dict[str, str]:
    """Options by name, other words by place: so that one changed option is one difference."""
    found: dict[str, str] = {}
    words = list(argv)
    place = 0
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word) and len(word) > 1:
            if not equals:
                has_value = bool(words) and not (words[0].startswith("-") and not re.fullmatch(r"-\d.*", words[0]))
                value = words.pop(0) if has_value else "on"
            found[name.replace("_", "-")] = value
        elif equals and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            found[name] = value
        else:
            # Interpreters and scripts are found in different folders on different machines.
            found[f"word {place}"] = Path(word).name if place == 0 else word
            place += 1
    return found


def _code(git: Mapping[str, Any]) -> dict[str, Any]:
    return {"commit": git.get("commit"), "uncommitted changes": git.get("diff_sha256") or "none"} if git else {}


def _add_attempt(found: Facts, run: RunDir) -> None:
    """The first attempt's code and packages: what it began with."""
    attempts = run.list_attempts()
    record = read_surroundings(attempts[0]) if attempts else None
    if record is None:
        return
    found["packages"].update({name: str(version) for name, version in record.packages.items()})
    if record.git:
        found["code"] = _flat(_code(record.git))


def _read_config(path: Path) -> dict[str, str]:
    try:
        # Blank lines cost PyYAML seconds when there are thousands of them.
        text = "\n".join(line for line in read_text(path, MAX_CONFIG_BYTES).splitlines() if line.strip())
        # An alias can make a few lines stand for billions, and the parser's time grows with the square of the depth.
        num_nested = sum(text.count(mark) for mark in ("[", "{", "- ", "? "))
        return {} if num_nested > MAX_NESTED or _ALIAS.search(text) else _flat(yaml.safe_load(text))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


def _add_checkpoint(found: Facts, run: RunDir) -> None:
    """What an attached loop wrote into its oldest checkpoint about itself."""
    folders = sorted(run.checkpoints.glob("step-*"))
    for folder in folders[:3]:
        state, manifest = atomic.read_json(folder / "state.json"), atomic.read_json(folder / "manifest.json")
        session = state.get("session") if isinstance(state, dict) else None
        print_ = session.get("fingerprint") if isinstance(session, dict) else None
        if not isinstance(print_, dict):
            continue
        found["data"] = _flat(print_.get("data"))
        found["training"] = _flat(print_.get("schedule"))
        found["code"].update({f"file {name}": value for name, value in _flat(print_.get("code")).items()})
        facts = manifest.get("facts") if isinstance(manifest, dict) else None
        environment = facts.get("environment") if isinstance(facts, dict) else None
        found["machine"].update({f"torch's {name}": value for name, value in _flat(environment).items()})
        return


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """A tree of mappings as dotted names; a list is one value."""
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, inner in value.items():
            found.update(_flat(inner, f"{name}.{key}" if name else str(key)))
            if len(found) > MAX_VALUES:
                break
        return found
    if value is None and not name:
        return {}
    return {name: value if isinstance(value, str) else json.dumps(value, default=str)}
