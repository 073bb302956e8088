"""`jackline launch`: files for schedulers. The sbatch script is run, with a small stand-in for Slurm's commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jackline.cli.launch.files import Job, kubernetes_jobset, skypilot_task, slurm_script
from jackline.cli.main import cli
from tests.deadline import HANGS_S

JOB = Job("my-job", ("train.py", "--note", "it's me"), nodes=2, gpus=8, time_limit_s=100_000, mirror="s3://b/r")


def shown(*words: str) -> str:
    done = CliRunner().invoke(cli, ["launch", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_sbatch_script_says_how_long_how_many_and_when_to_save() -> None:
    text = slurm_script(JOB)
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=1-03:46:40",
        "#SBATCH --signal=TERM@300",
        "#SBATCH --requeue",
    ):
        assert f"{line}\n" in text
    assert """ --mirror s3://b/r -- torchrun train.py --note 'it'"'"'s me' &""" in text


def test_shellcheck_finds_nothing_in_the_sbatch_script(tmp_path: Path) -> None:
    tool = shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    path = tmp_path / "job.sbatch"
    path.write_text(slurm_script(JOB))
    done = subprocess.run([tool, str(path)], capture_output=True, text=True, check=False, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout


def stand_ins(folder: Path) -> None:
    """srun runs its command as the only node, scontrol writes down what it is asked, torchrun counts its starts and
    can be resumed after the first."""
    scripts = {
        "srun": 'shift\nSLURM_NODEID=0 exec "$@"\n',
        "scontrol": 'echo "$*" >> asked.txt\necho node-a\necho node-b\n',
        "torchrun": 'echo "start $PET_RDZV_ENDPOINT $PET_NNODES $*" >> starts.txt\n'
        "[ $(wc -l < starts.txt) -ge 2 ] || exit 75\n",
        "jackline": f'exec {sys.executable} -m jackline "$@"\n',
    }
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)


def test_a_job_that_can_be_resumed_returns_to_the_queue_and_resumes(tmp_path: Path) -> None:
    tools, work = tmp_path / "bin", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    stand_ins(tools)
    script = work / "job.sbatch"
    script.write_text(slurm_script(Job("my-job", ("train.py", "--lr", "1"))))
    env = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    env.update({"JACKLINE_RUNS": str(work / "runs"), "XDG_STATE_HOME": str(tmp_path / "state")})

    def submit() -> int:
        words = ["bash", str(script)]
        return subprocess.run(words, cwd=work, env=env, capture_output=True, timeout=HANGS_S, check=False).returncode

    assert submit() == 75
    assert (work / "asked.txt").read_text() == "show hostnames n[1-2]\nrequeue 77\n"
    assert submit() == 0
    assert (work / "asked.txt").read_text().count("requeue 77\n") == 1
    assert (work / "starts.txt").read_text() == "start node-a:29500 1 train.py --lr 1\n" * 2
    assert [path.name for path in sorted((work / "runs/my-job-0/attempts").iterdir())] == ["001", "002"]


def test_the_task_for_skypilot_is_yaml_with_a_recovery() -> None:
    task = yaml.safe_load(skypilot_task(JOB))
    assert task["num_nodes"] == 2
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"]["strategy"] == "FAILOVER"
    assert "--mirror s3://b/r" in task["run"]


def test_the_jobset_for_kubernetes_has_a_pod_for_each_node() -> None:
    found = yaml.safe_load(kubernetes_jobset(JOB))
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"]) == (2, 2)
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["containers"][0]["args"][0].endswith("""train.py --note 'it'"'"'s me'""")
    assert json.loads(json.dumps(found)) == found


def test_skypilot_itself_reads_its_task(tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="needs skypilot, which is not among the tools of this repository")
    (tmp_path / "task.yaml").write_text(skypilot_task(JOB))
    assert sky.Task.from_yaml(str(tmp_path / "task.yaml")).num_nodes == 2


def test_the_types_of_jobset_know_every_field() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models.jobset_v1alpha2_job_set",
        reason="needs kubeflow-trainer-api, which is not among the tools of this repository",
    )
    wanted = yaml.safe_load(kubernetes_jobset(JOB))
    assert _names(wanted) <= _names(models.JobsetV1alpha2JobSet.from_dict(wanted).to_dict())


def _names(part: object, place: str = "") -> set[str]:
    """The paths of all fields."""
    if isinstance(part, dict):
        return {place}.union(*(_names(value, f"{place}/{word}") for word, value in part.items()))
    if isinstance(part, list):
        return {place}.union(*(_names(value, f"{place}/{number}") for number, value in enumerate(part)))
    return {place}


def test_the_file_is_written_once_and_names_the_next_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown("slurm", "--", "Train_GPT.py") == "wrote train-gpt.sbatch; read it, then: sbatch train-gpt.sbatch\n"
    assert (tmp_path / "train-gpt.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=train-gpt\n")
    again = CliRunner().invoke(cli, ["launch", "slurm", "--", "Train_GPT.py"])
    assert "train-gpt.sbatch exists already" in str(again.exception)
    assert shown("k8s", "--nodes", "3", "--print", "--", "train.py", "--nodes", "9").count("completions: 3") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm"], "no script was named"),
        (["slurm", "--", "python", "train.py"], "name the script without python"),
        (["skypilot", "--", "train.py"], "without a mirror a lost machine takes its checkpoints along"),
        (["slurm", "--mirror", "sftp://me:word@host/x", "--", "train.py"], "the mirror holds a password"),
        (["k8s", "--name", "My Job", "--", "train.py"], "'My Job' cannot be the name of a job"),
    ],
)
def test_what_would_not_work_is_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["launch", *words])
    assert message in str(done.exception)
