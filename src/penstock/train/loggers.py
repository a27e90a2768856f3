"""Where the events of a run go: JSON lines, TensorBoard, Weights & Biases, MLflow. Each is found when it is asked for.

    logger = open_logger("tensorboard", Path("runs/mine"))

A logger of your own has the three methods of `Logger`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import PenstockError, UnknownNameError

if TYPE_CHECKING:
    from penstock.train.events import StepEvent

EVENTS: Final = "events.jsonl"


class Logger(Protocol):
    """What an `EventLog` writes to.

    class Printer:
        def step(self, event): print(event.step, event.loss)
        def validation(self, step, loss): print(step, "validation", loss)
        def close(self): ...
    """

    def step(self, event: StepEvent) -> None: ...

    def validation(self, step: int, loss: float) -> None: ...

    def close(self) -> None: ...


def check_logger(name: str, *, opens: bool = True) -> None:
    """Say that there is no such logger, or that its package is missing where somebody `opens` it; nothing is opened here."""
    if name not in LOGGERS:
        raise UnknownNameError(f"there is no logger {name!r}; there are {', '.join(sorted(LOGGERS))}")
    if opens and name != "jsonl":
        with suppress(ValueError):  # of a module that somebody has put there
            package = find_spec(name)  # each has the name of its package
            if package is None or package.origin is None:  # also of a mere folder of that name, such as wandb makes
                raise _missing(name, name)


def _missing(name: str, package: str | None) -> PenstockError:
    return PenstockError(
        f'the logger {name!r} needs the package {package}, which is not installed: pip install "penstock[log]"'
    )


def open_logger(name: str, folder: Path, *, first_step: int = 0) -> Logger:
    """The logger of that name, which writes below `folder`; a run that goes on begins with `first_step`.

    >>> open_logger("excel", Path("runs"))
    Traceback (most recent call last):
    penstock.errors.UnknownNameError: there is no logger 'excel'; there are jsonl, mlflow, tensorboard, wandb
    """
    check_logger(name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return LOGGERS[name](folder, first_step)
    except ModuleNotFoundError as error:  # something that its package needs in turn
        raise _missing(name, error.name) from error


class JsonLines:
    """One JSON object a line in ``events.jsonl``: all figures, of each rank too.

    {"kind": "step", "step": 0, "loss": 5.5, "seconds": 0.2, ..., "ranks": [{"seconds": 0.2, "busy": 0.17, ...}, ...]}
    {"kind": "validation", "step": 40, "loss": 3.1, "time": 1700000000.0}
    {"kind": "step", "step": 41, "loss": null, ..., "not_finite": {"loss": "nan"}}
    """

    def __init__(self, folder: Path, first_step: int = 0, name: str = EVENTS) -> None:
        self._file, fresh = folder / name, folder / f"{name}.part"
        before = self._file.read_text(encoding="utf-8").splitlines() if first_step and self._file.is_file() else []
        kept = [f"{line}\n" for line in before if _is_before(line, first_step)]
        fresh.write_text("".join(kept), encoding="utf-8")
        fresh.replace(self._file)  # a run that is killed here has its events all the same

    def step(self, event: StepEvent) -> None:
        self.write(kind="step", **asdict(event))

    def validation(self, step: int, loss: float) -> None:
        self.write(kind="validation", step=step, loss=loss, time=time())

    def write(self, **said: object) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(strict_json(said) + "\n")

    def close(self) -> None:
        """Nothing is held back."""


def strict_json(said: Mapping[str, object]) -> str:
    """One object as JSON that every reader takes: it knows no NaN and no infinity, and a loss may become either. Such numbers
    are null, and `not_finite` tells what those at the top were.

    >>> strict_json({"step": 3, "loss": float("nan"), "ranks": [{"seconds": 0.5}]})
    '{"step": 3, "loss": null, "ranks": [{"seconds": 0.5}], "not_finite": {"loss": "nan"}}'
    """
    strange = {
        name: repr(float(value)) for name, value in said.items() if isinstance(value, float) and not isfinite(value)
    }
    whole = json.dumps({**said, "not_finite": strange} if strange else {**said})
    # Python's reader calls the function for each NaN and infinity that its writer has let through.
    return json.dumps(json.loads(whole, parse_constant=lambda word: None), allow_nan=False)


def _is_before(line: str, first_step: int) -> bool:
    """What a crash left beyond the checkpoint happens again; of a line that it cut off nothing is known."""
    try:
        return bool(json.loads(line)["step"] < first_step)
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


class _Scalars:
    """A logger of numbers with names: ``train/loss``, ``train/bubble``, ..., ``validation/loss``."""

    def step(self, event: StepEvent) -> None:
        self.send({f"train/{name}": value for name, value in event.metrics.items()}, event.step)

    def validation(self, step: int, loss: float) -> None:
        self.send({"validation/loss": loss}, step)

    def send(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoard(_Scalars):
    """Scalars for ``tensorboard --logdir FOLDER``, also the time and the memory of each rank."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)

    def step(self, event: StepEvent) -> None:
        super().step(event)
        for rank, figures in enumerate(event.ranks):
            self.send({f"rank {rank}/seconds": figures.seconds, f"rank {rank}/memory": figures.memory}, event.step)

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(_Scalars):
    """A run of Weights & Biases. ``WANDB_MODE``, ``WANDB_PROJECT`` and the like are heeded; without a mode it is offline."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        import wandb

        note = folder / "wandb-run.txt"  # a run that goes on is the same run
        again = note.read_text(encoding="utf-8") if first_step and note.is_file() else None
        self._run = wandb.init(
            dir=str(folder),
            id=again,
            resume=None if again is None else "allow",
            project=os.environ.get("WANDB_PROJECT", "penstock"),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]  # the user's word
            config={"folder": str(folder), "first_step": first_step},
        )
        note.write_text(self._run.id, encoding="utf-8")
        self._run.define_metric("*", step_metric="step")

    def send(self, values: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow(_Scalars):
    """A run of MLflow, at ``MLFLOW_TRACKING_URI`` or in ``mlflow.db`` in the folder."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from mlflow import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "penstock")
        self._client = MlflowClient(tracking_uri=place)
        note = folder / "mlflow-run.txt"  # a run that goes on is the same run
        if first_step and note.is_file():
            self._run = note.read_text(encoding="utf-8")
            self._client.update_run(self._run, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            self._run = self._client.create_run(experiment, tags={"mlflow.runName": folder.name}).info.run_id
            note.write_text(self._run, encoding="utf-8")

    def send(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


LOGGERS: Final[dict[str, Callable[[Path, int], Logger]]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
