"""A newcomer's mistakes, each with the whole text that is printed: what is wrong, and one next action.

All in this process, except where the trainer reads settings. None of them may leave a run behind.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.cli.main import main
from jackline.data.sources.bytefile import SourceUnavailable
from jackline.data.sources.hub import refuse_without_network
from jackline.data.tokenise import gpt2_files
from jackline.data.tokenise.tokenizer import NoTokenizer, load_tokenizer
from jackline.errors import JacklineError, UsageError
from jackline.machine import reach
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.plan.hub import find_config
from jackline.recipes.agab.data.weights import find_weights

GOLDEN = Path(__file__).parents[1] / "golden"
NO_RUN = "error: there is no run 'kiled' in WORK/runs\nhint: did you mean 'killed'?"
GPUS = f"       known GPUs: {', '.join(GPU_MODELS)}"
RECIPES = "       known recipes: demo, sparsae, agab, slimpajama, m7c"


def see(command: str) -> str:
    return f"hint: `jackline {command} --help` shows its options"


MISTAKES = {
    "rnu -- python train.py": "error: there is no command 'rnu'\nhint: did you mean 'jackline run'?",
    "run": "error: there is no command to run\nhint: write it after two dashes: jackline run -- python train.py",
    "run -- pyhton train.py": "error: there is no command 'pyhton'\nhint: did you mean 'python'?",
    "run -- no-such-program": (
        "error: there is no command 'no-such-program'\nhint: check the spelling and the active environment"
    ),
    "run -- ./train.py": (
        "error: cannot run './train.py'\n       './train.py' is a file that may not be executed\n"
        "hint: python ./train.py, or chmod +x ./train.py"
    ),
    "run -- python trian.py": "error: there is no file 'trian.py'\nhint: did you mean 'train.py'?",
    "run --name a/b -- true": (
        "error: 'a/b' cannot be a run name\n"
        "hint: use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 80"
    ),
    "run --resume-arg '--resume {checkpoint}' -- true": (
        "error: --resume-arg needs --checkpoints\nhint: --checkpoints 'out/checkpoint-*'"
    ),
    "run --resume-from pytorch -- true": (
        "error: unknown preset 'pytorch' for --resume-from: known are hf and lightning\n"
        'hint: for others say it yourself: --checkpoints GLOB --resume-arg "--resume {checkpoint}"'
    ),
    "run --checkpoints 'ckpt/*' --resume-arg '--resume {path}' -- true": (
        "error: --resume-arg knows only {checkpoint}, not {path}\n"
        'hint: for example --resume-arg "--resume {checkpoint}"'
    ),
    "run --time-limit soon -- true": "error: 'soon' is not a duration\nhint: write 90, 90s, 15m, 1h30m or 2d",
    "run --disk-budget lots -- true": "error: 'lots' is not a size\nhint: write 512, 300M, 20G or 1.5GiB",
    "run --restart -1 -- true": (
        f"error: Invalid value for '--restart': -1 is not in the range x>=0.\n{see('run')}"
    ),
    "run --on-stuck kill -- true": (
        f"error: Invalid value for '--on-stuck': 'kill' is not one of 'report', 'restart', 'stop'.\n{see('run')}"
    ),
    "run --stuck-after 0 -- true": f"error: --stuck-after must be more than 0, not 0\n{see('run')}",
    "run --mirror /proc/no/where -- true": (
        "error: cannot use /proc/no/where as a mirror: No such file or directory\nhint: name a folder or a URL"
    ),
    "run --json -- true": (
        "error: --json goes with --detach: else stdout holds what your command prints\n"
        "hint: add --detach; for a run in the foreground: `jackline status --json` from another shell"
    ),
    "run --name good -- true": (
        "error: run 'good' was started with another command\n"
        "       argv: python train.py --lr 0.001 -> true\n       cwd: WORK/work -> WORK\n"
        "hint: --new starts another run, --continue-with-changes continues this one"
    ),
    "status nope": (
        "error: there is no run 'nope' in WORK/runs\nhint: `jackline runs` lists the runs that can be found"
    ),
    "status kiled": NO_RUN,
    "why kiled": NO_RUN,
    "logs kiled": NO_RUN,
    "watch kiled": NO_RUN,
    "wait kiled": NO_RUN,
    "events kiled": NO_RUN,
    "stop kiled": NO_RUN,
    "resume kiled": NO_RUN,
    "validate kiled": NO_RUN,
    "checkpoints verify kiled": NO_RUN,
    "why --pid 999999999": (
        "error: there is no process 999999999\nhint: `ps -u $USER -o pid,etime,args` lists yours"
    ),
    "why killed --pid 1": (
        "error: a run and --pid were given; only one of them can be meant\nhint: jackline why killed"
    ),
    "why killed --attempt 9": "error: run 'killed' has no attempt 9: it has 1\nhint: jackline why killed",
    "logs killed --raw --json": (
        "error: --raw and --json do not go together\nhint: raw bytes are no lines; leave one of them out"
    ),
    "stop": "error: no run is alive\nhint: `jackline runs` lists them all",
    "wait killed --until stuk": (
        "error: --until does not know 'stuk'\n"
        "       words: ended, finished, stopped, dead, stuck, suspect, paused, restarted, nan\n"
        "hint: did you mean 'stuck'?"
    ),
    "wait killed --timeout later": "error: 'later' is not a duration\nhint: write 90, 90s, 15m, 1h30m or 2d",
    "events killed --since yesterday": (
        "error: 'yesterday' is not a cursor\nhint: take it from `jackline events --json`, or --since start"
    ),
    "train": "error: missing recipe\nhint: jackline train demo --quick; recipes are listed above",
    "train demoo": f"error: there is no recipe 'demoo'\n{RECIPES}\nhint: did you mean 'demo'?",
    "train demo --lr fast": (
        "error: lr=fast is not a number\nhint: `jackline train demo --help-settings` lists what may be set"
    ),
    "train demo learning_rte=0.1": (
        "error: unknown setting 'learning_rte' for recipe 'demo'\nhint: did you mean 'learning_rate'?"
    ),
    "train demo --lr": (
        "error: --lr needs a value\nhint: `jackline train demo --help-settings` lists what may be set"
    ),
    "train mine.py:recipe": (
        "error: mine.py has no function 'recipe' that could be trained\n"
        "hint: it takes nothing and returns a jackline.trainer.config.TrainConfig"
    ),
    "train gone.py:recipe": (
        "error: there is no file 'gone.py'\nhint: jackline train path/to/file.py"
    ),
    "train demo --config gone.yaml": (
        "error: cannot read gone.yaml: No such file or directory\n"
        "hint: `jackline train demo --help-settings` lists what may be set"
    ),
    "plan demo --gpu RTX9999": (
        f"error: there is no GPU 'RTX9999' in the table\n{GPUS}\nhint: or give its memory in GiB: --gpu 15"
    ),
    "plan demoo --gpu T4": f"error: there is no recipe 'demoo'\n{RECIPES}\nhint: did you mean 'demo'?",
    "plan demo --gpu T4 --table --json": (
        f"error: --table goes alone: it cannot be joined with --json, --explain or --fit\n{see('plan')}"
    ),
    "doctor demoo": (
        f"error: there is no recipe and no command 'demoo'\n{RECIPES}\nhint: did you mean 'demo'?"
    ),
    "doctor -- pyhton train.py": "error: there is no command 'pyhton'\nhint: did you mean 'python'?",
    "data prepare": f"error: Missing argument 'SOURCE...'.\n{see('data prepare')}",
    "data prepare a b --weights 1": "error: --weights '1' does not give 2 numbers\nhint: write --weights 0.7,0.3",
    "data prepare a --max-damaged 5": (
        "error: --max-damaged must be from 0 to 1, not 5.0\nhint: 0.1 allows a tenth"
    ),
    "data bench a --seconds 0": f"error: --seconds must be above 0 and finite, not 0.0\n{see('data')}",
}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: Path) -> Path:
    """A newcomer's folder: a script, and two runs that are over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "mine.py").write_text("def other():\n    pass\n")
    shutil.copytree(GOLDEN / "format1-finished", clean_environment / "good")
    shutil.copytree(GOLDEN / "format1-killed-oom", clean_environment / "killed")
    return tmp_path


def call(words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["jackline", *shlex.split(words)])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named_and_leads_somewhere(
    words: str, work: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Settings of a recipe are read by a child process, which prints to the descriptor.
    captured = request.getfixturevalue("capfd" if words.startswith("train ") else "capsys")
    before = sorted(path.name for path in (work / "runs").iterdir())
    assert call(words, monkeypatch) == 2
    assert captured.readouterr().err.replace(str(work), "WORK").rstrip("\n") == MISTAKES[words]
    assert sorted(path.name for path in (work / "runs").iterdir()) == before


def test_there_are_at_least_forty() -> None:
    assert len(MISTAKES) >= 40
    assert all(text.startswith("error: ") and "\nhint: " in text for text in MISTAKES.values())


def test_a_gpu_where_there_is_none_is_two_lines(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from jackline.machine.gpu import watch

    monkeypatch.setattr(watch, "gpu_names", list)
    assert call("train demo --quick --device cuda", monkeypatch) == 2
    assert capfd.readouterr().err == (
        "error: device=cuda, but there is no NVIDIA GPU here, or its driver does not answer\n"
        "hint: device=auto takes what is there; `jackline doctor` shows the GPUs of this machine\n"
    )


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No name can be resolved, as on a machine without a network."""

    def fails(*words: object, **named: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(reach.socket, "getaddrinfo", fails)
    yield


def test_data_on_the_hub_without_a_network_is_refused_at_once(offline: None) -> None:
    with pytest.raises(SourceUnavailable) as found:
        refuse_without_network("hf://datasets/a/b")
    assert str(found.value) == (
        "error: no network: huggingface.co cannot be reached (Name or service not known), so hf://datasets/a/b "
        "cannot be read\nhint: connect and run the same command again, or use a local copy"
    )


@pytest.mark.parametrize("waits", ["getaddrinfo", "create_connection"])
def test_a_network_that_never_answers_is_known_within_seconds(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver, or a firewall behind it."""
    never = threading.Event()

    def waits_for_ever(*words: object, **named: object) -> None:
        never.wait()
        raise OSError

    monkeypatch.setattr(reach.socket, waits, waits_for_ever)
    monkeypatch.setattr(reach, "getproxies", dict)
    assert reach.find_trouble("huggingface.co", within_s=0.05) == "no answer within 0.05 s"
    never.set()


def test_the_hub_is_reached_where_its_address_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"}
        assert reach.hub_trouble(place) is None
    assert reach.hub_trouble(place) == "Connection refused"


def test_whatever_comes_from_the_hub_is_refused_within_seconds_without_a_network(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(gpt2_files, "_package_folders", list)
    for ask in (gpt2_files.find_gpt2_files, lambda: find_config("hf:a/b"), lambda: find_weights("a/b", tmp_path)):
        with pytest.raises(JacklineError) as found:
            ask()
        assert "no network: huggingface.co cannot be reached (Name or service not known)" in str(found.value)


def test_a_tokenizer_that_cannot_be_had_is_named(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(NoTokenizer) as found:
        load_tokenizer("no/such-tokenizer")
    assert str(found.value) == (
        "error: cannot get the tokenizer 'no/such-tokenizer' from the hub: no network: huggingface.co cannot be "
        "reached (Name or service not known)\n"
        "hint: check its name; or a tokenizer that needs no network: gpt2, bytes, train, or a tokenizer.json"
    )
    with pytest.raises(UsageError, match=r"there is no tokenizer 'missing\.json'"):
        load_tokenizer("missing.json")
