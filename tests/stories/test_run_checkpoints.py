"""A script with checkpoints of its own, stopped, killed and resumed: nothing is begun anew, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.shell import Done, Shell
from tests.stories.saves_its_own import read_step

pytestmark = pytest.mark.zoo

PROGRAM = Path(__file__).with_name("saves_its_own.py")
GLOBS = {
    "fixed": "last.pt",
    "hf": "checkpoint-*",
    "nanogpt": "ckpt.pt",
    "numbered": "step-*.pt",
    "turns": "model_*.pt",
}


def words_for(kind: str, *more: str, resume_arg: str = "--resume {checkpoint}", every: int = 10) -> list[str]:
    command = [sys.executable, str(PROGRAM), kind, "--every", str(every), "--hold-after", "2", *more]
    return ["run", "--name", "mine", "--checkpoints", GLOBS[kind], "--resume-arg", resume_arg, "--", *command]


def run_until(shell: Shell, words: list[str], text: str) -> str:
    """Start it, wait for `text`, stop it politely; what was on the screen."""
    live = shell.start(*words)
    live.wait_for(text)
    assert shell.jackline("stop", "mine").code == 0
    assert live.wait() == 75, live.text()
    return live.text()


def kept_steps(shell: Shell) -> list[int]:
    return sorted(read_step(path) for path in (shell.runs / "mine" / "kept").glob("*/*"))


def test_a_checkpoint_that_is_always_rewritten_is_resumed_from_after_every_stop(shell: Shell) -> None:
    """D6: a fixed name. The third start began at zero, over the good file."""
    words = words_for("fixed")
    run_until(shell, words, "saved 20 last.pt")
    second = run_until(shell, words, "saved 40 last.pt")
    third = run_until(shell, words, "saved 60 last.pt")
    fourth = run_until(shell, ["resume", "mine"], "saved 80 last.pt")
    path = shell.work / "last.pt"
    assert [f"started at {step} from {path}" in text for step, text in ((20, second), (40, third), (60, fourth))] == [
        True
    ] * 3
    assert read_step(path) == 80
    assert kept_steps(shell) == [40, 60]


def test_a_polite_stop_is_no_failure_of_the_checkpoint(shell: Shell) -> None:
    """D7: resumed at 50, stopped before the next save, resumed at 50 again and not at 25."""
    words = words_for("hf", every=25)
    run_until(shell, words, "saved 50")
    (shell.work / "wait").touch()
    for _ in range(2):
        text = run_until(shell, words, "started at ")
        assert f"started at 50 from {shell.work / 'checkpoint-50'}" in text


def test_what_it_resumes_from_is_said_before_it_starts(shell: Shell) -> None:
    """D9: on the screen, in status of the stopped run, in the events."""
    run_until(shell, words_for("fixed"), "saved 20")
    path = shell.work / "last.pt"
    status = shell.jackline("status", "mine").out
    assert f"resumes from {path}, written " in status, status
    assert json.loads(shell.jackline("status", "mine", "--json").out)["resume"]["checkpoint"] == str(path)
    (shell.work / "wait").touch()
    for words in (["resume", "mine"], words_for("fixed")):
        text = run_until(shell, words, "started at ")
        said = text.index(f"[jackline] attempt {2 if words[0] == 'resume' else 3} resumes from {path}, written ")
        assert said < text.index("started at 20"), text
    (event, again) = shell.run_dir("mine").events("resumes")
    assert event["checkpoint"] == again["checkpoint"] == str(path)


def test_a_bad_quote_in_the_resume_argument_is_refused_at_the_start(shell: Shell) -> None:
    """C8: the supervisor crashed at the first restart."""
    done = shell.jackline(*words_for("fixed", resume_arg="--resume '{checkpoint}"))
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        'error: --resume-arg "--resume \'{checkpoint}" cannot be split into words: No closing quotation\n'
        'hint: write it as on a command line: --resume-arg "--resume {checkpoint}"\n'
    )
    assert not shell.runs.exists()


def test_an_unknown_placeholder_in_the_resume_argument_is_refused_at_the_start(shell: Shell) -> None:
    done = shell.jackline(*words_for("fixed", resume_arg="--resume {ckpt}"))
    assert done.code == 2
    assert done.err.startswith("error: --resume-arg knows only {checkpoint}, not {ckpt}\n")
    assert not shell.runs.exists()


def test_a_resume_argument_without_a_placeholder_is_added_once_there_is_a_checkpoint(shell: Shell) -> None:
    """nanoGPT's --init_from=resume finds the file itself, and fails without one."""
    words = words_for("nanogpt", resume_arg="--init_from=resume")
    first = run_until(shell, words, "saved 20 ckpt.pt")
    assert "started at 0 from scratch" in first
    assert "started at 20 from ckpt.pt" in run_until(shell, words, "saved 40 ckpt.pt")


def refused(shell: Shell, *words: str) -> Done:
    before = sorted((shell.runs / "mine" / "attempts").iterdir())
    done = shell.jackline(*words)
    assert done.code == 3, done
    assert sorted((shell.runs / "mine" / "attempts").iterdir()) == before
    return done


def test_only_suspect_checkpoints_are_refused_until_a_person_decides(shell: Shell) -> None:
    words = words_for("fixed")
    run_until(shell, words, "saved 20")
    (shell.work / "refuse").touch()
    assert shell.jackline(*words).code == 1  # loading it fails
    path = shell.work / "last.pt"
    for again in (words, ["resume", "mine"]):
        done = refused(shell, *again)
        assert done.err.startswith("error: run 'mine' cannot resume: none of its checkpoints can be trusted\n"), done
        assert f"       {path}: attempt 2 failed while it loaded this one\n" in done.err, done
        assert f"hint: jackline resume mine --from {path}" in done.err, done
        assert "jackline resume mine --from-scratch" in done.err, done
    status = shell.jackline("status", "mine").out
    assert f"{path}: attempt 2 failed while it loaded this one\n" in status, status
    assert status.endswith(done.err.splitlines()[-1] + "\n"), status
    (shell.work / "refuse").unlink()
    text = run_until(shell, ["resume", "mine", "--from", str(path)], "saved 40")
    assert f"started at 20 from {path}" in text
    # It loaded after all, and a newer one was written: no word is needed any more.
    assert f"started at 40 from {path}" in run_until(shell, ["resume", "mine"], "saved 60")


def test_a_torn_checkpoint_is_passed_over_for_the_copy_that_was_kept(shell: Shell) -> None:
    words = words_for("fixed")
    run_until(shell, words, "saved 20")
    run_until(shell, words, "saved 40")
    path = shell.work / "last.pt"
    path.write_bytes(path.read_bytes()[:9000])
    text = run_until(shell, words, "started at ")
    kept = shell.runs / "mine" / "kept" / "0001" / "last.pt"
    assert f"started at 20 from {kept}" in text
    assert f"passed over {path}: it ends after 9000 bytes without a zip directory: it was cut off" in text, text


def test_the_kept_copy_is_put_in_place_for_a_command_that_looks_there_itself(shell: Shell) -> None:
    words = words_for("nanogpt", resume_arg="--init_from=resume")
    run_until(shell, words, "saved 20")
    run_until(shell, words, "saved 40")
    path = shell.work / "ckpt.pt"
    torn = path.read_bytes()[:9000]
    path.write_bytes(torn)
    assert "started at 20 from ckpt.pt" in run_until(shell, words, "saved 40")
    (aside,) = shell.work.glob(".ckpt.pt.set-aside-*")
    assert aside.read_bytes() == torn


def test_a_torn_first_checkpoint_is_not_begun_over_without_a_word(shell: Shell) -> None:
    words = words_for("fixed")
    run_until(shell, words, "saved 20")
    path = shell.work / "last.pt"
    path.write_bytes(path.read_bytes()[:9000])
    done = refused(shell, *words)
    assert f"{path}: it ends after 9000 bytes" in done.err
    text = run_until(shell, ["resume", "mine", "--from-scratch"], "saved 20")
    assert "started at 0 from scratch" in text


def test_checkpoints_that_are_gone_are_not_begun_anew_without_a_word(shell: Shell) -> None:
    words = words_for("numbered")
    run_until(shell, words, "saved 20")
    for path in shell.work.glob("step-*.pt"):
        path.unlink()
    done = refused(shell, *words)
    assert f"       {shell.work / 'step-20.pt'}: it is gone\n" in done.err, done


def test_of_two_files_written_in_turn_the_later_one_is_used(shell: Shell) -> None:
    """Their numbers say nothing about their age."""
    words = words_for("turns")
    run_until(shell, words, "saved 20 model_0.pt")
    text = run_until(shell, words, "saved 40 model_0.pt")
    assert f"started at 20 from {shell.work / 'model_0.pt'}" in text


def test_going_back_by_hand_leaves_the_later_ones_behind(shell: Shell) -> None:
    words = words_for("numbered")
    run_until(shell, words, "saved 20")
    run_until(shell, words, "saved 40")
    old = shell.work / "step-20.pt"
    (shell.work / "wait").touch()
    for words in (["resume", "mine", "--from", str(old)], ["resume", "mine"]):
        assert f"started at 20 from {old}" in run_until(shell, words, "started at ")
    (shell.work / "wait").unlink()
    # Written anew, with the very same contents as the one that was left behind.
    run_until(shell, ["resume", "mine"], "saved 30")
    assert "started at 40 from" in run_until(shell, ["resume", "mine"], "started at ")


def test_one_that_failed_to_load_is_passed_over_for_the_one_before_and_that_is_said(shell: Shell) -> None:
    words = words_for("numbered")
    run_until(shell, words, "saved 20")
    (shell.work / "refuse").touch()
    assert shell.jackline(*words).code == 1
    (shell.work / "refuse").unlink()
    text = run_until(shell, words, "started at ")
    assert f"started at 10 from {shell.work / 'step-10.pt'}" in text
    assert f"passed over {shell.work / 'step-20.pt'}: attempt 2 failed while it loaded this one" in text


def test_an_error_that_is_not_about_loading_leaves_the_checkpoint_in_use(shell: Shell) -> None:
    """A typing mistake in the script must not cost the newest checkpoint."""
    words = words_for("numbered")
    run_until(shell, words, "saved 20")
    (shell.work / "mistake").touch()
    assert shell.jackline(*words).code == 1
    (shell.work / "mistake").unlink()
    assert "started at 20 from " in run_until(shell, words, "started at ")


def test_checkpoints_from_before_the_run_are_mentioned_and_not_used(shell: Shell) -> None:
    path = shell.work / "last.pt"
    path.write_bytes(b"from another day")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    text = run_until(shell, words_for("fixed"), "saved 20")
    assert f"{path} (" in text and "is from before this run: it is not resumed from" in text, text
    assert "started at 0 from scratch" in text


def test_going_back_is_refused_where_it_cannot_be_meant(shell: Shell) -> None:
    assert shell.jackline("run", "--name", "plain", "--", "false").code == 1
    done = shell.jackline("resume", "plain", "--from-scratch")
    assert done.code == 2
    assert done.err == (
        "error: --from-scratch is for a script's own checkpoints; run 'plain' was started without --checkpoints\n"
        "hint: Jackline's own checkpoints: jackline resume --step N; from the beginning: jackline run --new\n"
    )
    run_until(shell, words_for("fixed"), "saved 20")
    done = shell.jackline("resume", "mine", "--from", "nowhere.pt")
    assert done.code == 2
    assert done.err.startswith(f"error: --from {shell.work / 'nowhere.pt'}: there is no such file or folder\n")


LEAVES = """
import os, signal, sys, time
def leave(number, frame):
    print("[rank: 0] Received SIGTERM:", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
step = int(open(sys.argv[1]).read()) if len(sys.argv) > 1 else 0
print("started at", step, flush=True)
for step in range(step + 1, 6):
    with open("new", "w") as file: file.write(str(step))
    os.replace("new", f"step-{step}.txt")
    print(f"step {step}/5", flush=True)
    while step == 3 and not os.path.exists("go"): time.sleep(0.01)
"""


def test_a_script_that_leaves_with_0_after_a_sigterm_has_not_finished(shell: Shell) -> None:
    """Lightning does: the run was sealed as finished, and the only hint was to begin anew."""
    command = shell.python("train.py", LEAVES)
    words = ["run", "--name", "mine", "--checkpoints", "step-*.txt", "--resume-arg", "{checkpoint}", "--", *command]
    live = shell.start(*words)
    live.wait_for("step 3/5")
    os.kill(shell.run_dir("mine").child_pid(), signal.SIGTERM)
    assert live.wait() == 75, live.text()
    assert "it printed: [rank: 0] Received SIGTERM: 15" in live.text()
    assert f"next start: resumes from {shell.work / 'step-3.txt'}" in shell.jackline("status", "mine").out
    (shell.work / "go").touch()
    again = shell.jackline("resume", "mine")
    assert again.code == 0 and "started at 3" in again.out, str(again)
    assert "finished" in shell.jackline("status", "mine").out.splitlines()[0]
