"""Metrics to W&B, MLflow and trackio. Their packages are imported when an exporter for them opens, in its process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackline.errors import UsageError
from jackline.exporters.reader import About, Points
from jackline.exporters.sending import Sink

_MLFLOW_BATCH = 900
_ENDED = {"finished": "FINISHED", "stopped": "KILLED", "dead": "FAILED"}


def _import(name: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise UsageError(
            f"sending to {name} needs the package '{package}', which is not installed here",
            hint=f"pip install {package}",
        ) from None


class Wandb(Sink):
    """Without a key nothing is sent: W&B writes files below the run's folder, and `wandb sync` sends them later.

    Never asks for a login. Steps are a metric of their own (`step`), because W&B drops steps that do not only grow.
    """

    takes_points = True

    def __init__(self, project: str, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._module = _import("wandb", "wandb")
        self._run: Any = None

    def open(self, about: About) -> Mapping[str, float]:
        wandb = self._module
        self._folder.mkdir(parents=True, exist_ok=True)
        has_key = bool(os.environ.get("WANDB_API_KEY") or _has_login())
        self._run = wandb.init(
            project=self._project,
            name=about.name,
            id=about.id,
            resume="allow",
            dir=str(self._folder),
            mode=os.environ.get("WANDB_MODE") or ("online" if has_key else "offline"),
            config=dict(about.facts),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._run.define_metric("*", step_metric="step")
        return {}

    def send_points(self, points: tuple[Points, ...]) -> None:
        for point in points:
            step = {} if point.step is None else {"step": point.step}
            self._run.log({**point.values, **step})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "dead" else 0)


def _has_login() -> bool:
    try:
        return "api.wandb.ai" in (Path.home() / ".netrc").read_text(errors="replace")
    except OSError:
        return False


class Mlflow(Sink):
    """One MLflow run for one run of ours, found again by a tag. What it holds is asked, so nothing is doubled."""

    takes_points = True

    def __init__(self, uri: str | None, experiment: str) -> None:
        self._uri, self._experiment = uri, experiment
        _import("mlflow", "mlflow-skinny")
        self._tracking = _import("mlflow.tracking", "mlflow-skinny")
        self._entities = _import("mlflow.entities", "mlflow-skinny")
        self._client: Any = None
        self._run_id = ""

    def open(self, about: About) -> Mapping[str, float]:
        try:
            self._client = self._tracking.MlflowClient(tracking_uri=self._uri)
        except Exception as error:  # a store that this installation cannot open: waiting does not help
            text = str(error).strip().partition("\n")[0][:200]
            hint = "name a server: --to mlflow:http://HOST:5000; or pip install mlflow for --to mlflow:sqlite:///FILE"
            raise UsageError(f"MLflow cannot use this place: {text}", hint=hint) from None
        experiment = self._client.get_experiment_by_name(self._experiment)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        found = self._client.search_runs(
            [identity], filter_string=f"tags.`jackline.id` = '{about.id}'", max_results=1
        )
        if not found:
            tags = {"jackline.id": about.id, **{f"jackline.{key}": value for key, value in about.facts.items()}}
            began_ms = None if about.created_at_s is None else int(about.created_at_s * 1000)
            made = self._client.create_run(identity, start_time=began_ms, tags=tags, run_name=about.name)
            self._run_id = made.info.run_id
            return {}
        self._run_id = found[0].info.run_id
        return {name: self._last_step(name) for name in found[0].data.metrics}

    def _last_step(self, name: str) -> float:
        history = self._client.get_metric_history(self._run_id, name)
        return float(max((entry.step for entry in history), default=-math.inf))

    def send_points(self, points: tuple[Points, ...]) -> None:
        metric = self._entities.Metric
        rows = [
            metric(_mlflow_name(name), value, int((point.at_s or time.time()) * 1000), int(point.step or 0))
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(rows), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=rows[start : start + _MLFLOW_BATCH])

    def close(self, state: str) -> None:
        if state in _ENDED:
            self._client.set_terminated(self._run_id, status=_ENDED[state])


def _mlflow_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in name)[:250]


class Trackio(Sink):
    """A local trackio project; a run of ours has the same name there, and is continued."""

    takes_points = True

    def __init__(self, project: str) -> None:
        self._project = project
        self._module = _import("trackio", "trackio")
        self._run: Any = None

    def open(self, about: About) -> Mapping[str, float]:
        self._run = self._module.init(
            project=self._project,
            name=f"{about.name}-{about.id[:6]}",
            resume="allow",
            config=dict(about.facts),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return {}

    def send_points(self, points: tuple[Points, ...]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=None if point.step is None else int(point.step))

    def close(self, state: str) -> None:
        self._run.finish()
