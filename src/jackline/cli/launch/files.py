"""The files that start a job on a scheduler: an sbatch script, a SkyPilot task, a Kubernetes JobSet. Pure text.

Each is written around torchrun and `jackline run`, is meant to be read and edited, and does the same four things: end
politely before the time limit, return to the queue when it can be resumed (exit code 75), resume from its
checkpoints, and copy them to the mirror.
"""

from __future__ import annotations

import json
import shlex

from jackline.immutable import immutable

PORT = 29500
RESUMABLE = 75


@immutable
class Job:
    """What to start, and on how much. `command` is the script with its arguments, as torchrun gets it."""

    name: str
    command: tuple[str, ...]
    nodes: int = 1
    gpus: int = 1  # of each node
    time_limit_s: int = 24 * 3600
    warning_s: int = 300  # the signal comes this long before the limit
    mirror: str | None = None
    image: str = "YOUR-IMAGE"

    @property
    def words(self) -> str:
        return shlex.join(self.command)

    @property
    def mirror_words(self) -> str:
        return f" --mirror {shlex.quote(self.mirror)}" if self.mirror else ""


def slurm_script(job: Job) -> str:
    """An sbatch script. Every node runs one supervisor; Slurm signals them before the limit, and they save."""
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --time={_clock(job.time_limit_s)}
#SBATCH --signal=TERM@{job.warning_s}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={job.name}-%j.log
# Written by `jackline launch slurm`; edit it freely. The folder must be visible on every node.
set -uo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
# torchrun reads its options from PET_ variables. In the command they would make it another one after a requeue.
export PET_NNODES={job.nodes} PET_NPROC_PER_NODE={job.gpus} PET_RDZV_BACKEND=c10d PET_RDZV_ID=$SLURM_JOB_ID
export PET_RDZV_ENDPOINT="${{nodes%%$'\n'*}}:{PORT}"

# One supervisor a node. SIGTERM ({job.warning_s} s before the limit, or a preemption) saves; exit code {RESUMABLE}.
# shellcheck disable=SC2329  # srun calls it
node() {{
  name={job.name}-$SLURM_NODEID
  if [ -e "${{JACKLINE_RUNS:-runs}}/$name/run.json" ]; then
    jackline resume "$name" --here &
  else
    jackline run --name "$name"{job.mirror_words} -- torchrun {job.words} &
  fi
  run=$!
  trap 'jackline stop "$name"' TERM
  # A signal ends `wait` early, so wait until the run itself has ended.
  while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
  return "${{code:-0}}"
}}
export -f node

srun --kill-on-bad-exit=0 bash -c node &
step=$!
trap '' TERM # the steps get the signal too, and end by themselves
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
if [ "${{code:-0}}" -eq {RESUMABLE} ]; then
  echo "saved: back to the queue, to resume"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "${{code:-0}}"
"""


def skypilot_task(job: Job) -> str:
    """A SkyPilot managed job. A lost spot machine is replaced, and the run resumes from its mirror."""
    run = f"""export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
name={shlex.quote(job.name)}-$SKYPILOT_NODE_RANK
code=0
jackline run --name "$name"{job.mirror_words} -- \\
  torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node="$SKYPILOT_NUM_GPUS_PER_NODE" \\
  --node-rank="$SKYPILOT_NODE_RANK" --master-addr="$MASTER_ADDR" --master-port={PORT} \\
  {job.words} || code=$?
exit $code
"""
    lines = [
        "# Written by `jackline launch skypilot`; edit it freely. Start: sky jobs launch FILE",
        f"name: {json.dumps(job.name)}",
        f"num_nodes: {job.nodes}",
        "resources:",
        f"  accelerators: YOUR-GPU:{job.gpus}  # for example A100:{job.gpus}",
        "  use_spot: true",
        "  job_recovery:",
        "    strategy: FAILOVER",
        "    max_restarts_on_errors: 100  # exit code 75 is one: it can be resumed",
        "workdir: .",
        "setup: |",
        "  pip install 'jackline[train]'",
        "run: |",
        *(f"  {line}" for line in run.splitlines()),
    ]
    return "\n".join(lines) + "\n"


def kubernetes_jobset(job: Job) -> str:
    """A JobSet with one pod a node. A pod that ends with 75 is started again and resumes."""
    rendezvous = f"{job.name}-node-0-0.{job.name}"
    run = (
        f'exec jackline run --name {shlex.quote(job.name)}-"$JOB_COMPLETION_INDEX"{job.mirror_words} -- '
        f"torchrun --nnodes={job.nodes} --nproc-per-node={job.gpus} "
        f'--node-rank="$JOB_COMPLETION_INDEX" --master-addr={rendezvous} --master-port={PORT} {job.words}'
    )
    return f"""# Written by `jackline launch k8s`; edit it freely. Needs JobSet (sigs.k8s.io/jobset).
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {json.dumps(job.name)}
spec:
  failurePolicy:
    maxRestarts: 100
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {job.nodes}
          parallelism: {job.nodes}
          backoffLimit: 0
          activeDeadlineSeconds: {job.time_limit_s}
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {job.warning_s}
              containers:
                - name: train
                  image: {json.dumps(job.image)}
                  command: ["/bin/bash", "-c"]
                  args: [{json.dumps(run)}]
                  resources:
                    limits:
                      nvidia.com/gpu: {job.gpus}
                  volumeMounts:
                    - name: runs
                      mountPath: /runs
                  env:
                    - name: JACKLINE_RUNS
                      value: /runs
              volumes:
                - name: runs
                  persistentVolumeClaim:
                    claimName: YOUR-SHARED-VOLUME
"""


def _clock(seconds: int) -> str:
    """'1-02:03:04', as Slurm writes a time limit."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
