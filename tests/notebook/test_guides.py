"""The guides for notebooks, ssh and trouble: every command in them works, every name in them exists."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import click
import pytest

from jackline import notebook
from jackline.cli.main import cli
from jackline.notebook.command import as_words
from jackline.trainer.config import resolve_words
from tests.notebook.guides import FOLDER, NAMES, find_blocks, find_commands, find_mentions, read_guide
from tests.shell import Done, Shell, is_running, wait_for

COUNTING = """
import time
for step in range(1000000):
    print(f"step {step}/1000000", flush=True)
    time.sleep(0.02)
"""
LOOP = """
import time
import jackline
with jackline.attach(best=0.0, save_every_steps=5, keep_last=1000) as run:
    for step in run.steps(total=1000000):
        if step % 10 == 0: print(f"step {step}/1000000", flush=True)  # `logs --tail 200` must reach back to the start
        time.sleep(0.02)
"""
# Minutes of CPU in all; read word by word in every test run, and really run by the slow one below.
HEAVY = ("jackline plan ", "jackline doctor demo", "jackline data bench")


class Reader:
    """Somebody who types what a guide says, in its order."""

    def __init__(self, person: Shell, script: str) -> None:
        self.person = person
        person.script("train.py", script)
        # The interpreter of the tests is the `python` of the guides.
        person.env["PATH"] = f"{Path(sys.executable).parent}:{person.env['PATH']}"

    def type(self, command: str) -> Done:
        words = shlex.split(command)
        assert words[0] == "jackline"
        if "watch" in words or "-f" in words:
            return self.look_and_leave(words[1:])
        return self.person.jackline(*words[1:])

    def look_and_leave(self, words: list[str]) -> Done:
        live = self.person.start(*words)
        live.wait_for("step ")
        live.press_ctrl_c()
        code = live.wait()
        return Done(0 if code == 130 else code, live.text("out"), live.text("err"))


def is_heavy(command: str) -> bool:
    return command.startswith(HEAVY)


@pytest.mark.zoo
def test_the_guide_to_ssh_is_a_story_that_works(person: Shell, tmp_path: Path) -> None:
    reader = Reader(person, COUNTING)
    for command in find_commands("ssh"):
        pid = str(person.run_dir("mine").child_pid(2)) if "--pid" in command else ""
        if "./mine" in command and not (person.work / "mine").exists():
            shutil.copytree(person.runs / "mine", person.work / "mine")  # what scp does
        if "resume /mnt/saved" in command:
            shutil.rmtree(person.runs / "far")  # another machine
        typed = command.replace("/mnt/saved", str(tmp_path / "saved")).replace("12345", pid)
        done = reader.type(typed)
        assert done.code == 0, f"{command}: {done}"
        if command.startswith(("jackline run", "jackline resume")):
            name = "far" if "far" in command else "mine"
            wait_for(lambda name=name: "step " in person.run_dir(name).log(), "output")
    assert person.run_dir("mine").state()["attempt"] == 2
    assert person.run_dir("far").state()["attempt"] == 2


@pytest.mark.zoo
def test_the_guide_to_trouble_is_a_story_that_works(person: Shell) -> None:
    """The run lives at first, is killed before the section about -9, and continues for those about checkpoints."""
    reader = Reader(person, LOOP)
    start = ["run", "--name", "mine", "--detach", "--", "python", "train.py"]
    assert person.jackline(*start).code == 0
    mine = person.run_dir("mine")
    wait_for(lambda: any((mine.path / "checkpoints").glob("step-0*5")), "a checkpoint")
    said = ""
    for command in find_commands("troubleshooting"):
        if is_heavy(command):
            continue
        done = reader.type(command.replace("12345", str(mine.child_pid())))
        assert done.code == 0, f"{command}: {done}"
        said += done.out
        if "--pid" in command:
            kill(mine.child_pid())
            mine.wait_until_over()
        if "--name again" in command:
            assert person.jackline("stop", "again").code == 0
            assert person.jackline(*start).code == 0
            wait_for(lambda: "resuming from step-" in mine.log(), "the receipt")
    for words in (
        "mine: alive, attempt 1",
        "killed with SIGKILL (kill -9) by someone else",
        "whole",
        "resuming from",
    ):
        assert words in said, words


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid), "a killed process to end")


@pytest.mark.zoo
def test_the_commands_of_the_guide_to_colab_work(person: Shell) -> None:
    reader = Reader(person, COUNTING)
    assert person.jackline("run", "--name", "mine", "--detach", "--", "python", "train.py").code == 0
    for command in find_commands("colab"):
        done = reader.type(command)
        assert done.code == 0, f"{command}: {done}"


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for name in NAMES for one in find_commands(name) if is_heavy(one)])
def test_the_commands_that_take_long_work_too(person: Shell, command: str) -> None:
    done = person.jackline(*shlex.split(command)[1:])
    assert done.code == 0, done


def parse(command: str) -> tuple[click.Command, dict[str, object]]:
    """As the command line reads it, without doing it."""
    words = shlex.split(command)[1:]
    found: click.Command = cli
    context: click.Context | None = None
    while isinstance(found, click.Group):
        context = found.make_context(found.name, words, parent=context)
        name, inner, words = found.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None, f"{command}: there is no '{name}'"
        found = inner
    with found.make_context(found.name, words, parent=context) as inside:
        return found, inside.params


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_guide_can_be_read_and_its_settings_exist(name: str) -> None:
    commands = find_commands(name)
    assert commands
    for command in commands:
        _, given = parse(command)
        word = command.split()[1]
        if word == "train":
            resolve_words(str(given["recipe"]), given["settings"])  # type: ignore[arg-type]
        if command.startswith("jackline doctor demo"):
            resolve_words("demo", shlex.split(command)[3:])
        if word == "plan":
            resolve_words(str(given["target"]), given["settings"])  # type: ignore[arg-type]
    for mention in find_mentions(name):
        parse(mention)


def test_every_call_in_the_guide_to_colab_has_the_arguments_it_names() -> None:
    calls = 0
    for block in find_blocks("colab", "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = {"notebook": notebook, "run": notebook.Run}[ast.unparse(node.func.value)]
                signature = inspect.signature(getattr(owner, node.func.attr))
                mine = [None] if owner is notebook.Run else []
                signature.bind(*mine, *node.args, **{str(word.arg): word.value for word in node.keywords})
                calls += 1
                check_settings(node)
    assert calls >= 9


def check_settings(node: ast.Call) -> None:
    """Keywords that are settings of a recipe exist there, and options of `jackline run` exist there."""
    assert isinstance(node.func, ast.Attribute)
    given = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    first = ast.literal_eval(node.args[0]) if node.args else ""
    if node.func.attr in ("train", "plan"):
        given.pop("gpu", None)
        resolve_words(first, as_words(given))
    if node.func.attr == "run":
        parse(shlex.join(["jackline", "run", *as_words(given), "--", *shlex.split(first)]))


@pytest.mark.parametrize("name", NAMES)
def test_the_links_of_a_guide_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", read_guide(name)):
        path, anchor = target
        page = FOLDER / path if path else FOLDER / f"{name}.md"
        assert page.exists(), target
        if page.suffix != ".md":  # a picture, a notebook
            continue
        headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert not anchor or anchor in [anchor_of(heading) for heading in headings], target


def anchor_of(heading: str) -> str:
    """As the sites that show such pages make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_symptoms_people_search_for_are_headings() -> None:
    headings = re.findall(r"^## (.*)$", read_guide("troubleshooting"), re.MULTILINE)
    wanted = ["No output", "Exit -9", "Stuck at 0 %", "LR looks wrong", "Loss jumped after resume"]
    assert [heading for heading in headings if heading in wanted] == wanted
