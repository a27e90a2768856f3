"""Lightning: an ordinary LightningModule, trained in a pipeline.

    trainer = lightning.Trainer(devices=2, strategy=PipelineStrategy(microbatches=8))
    trainer.fit(module, loader)

docs/integrations/lightning.md has the whole story. pip install "penstock[lightning]".
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor, nn

from penstock.checkpoint import kept
from penstock.checkpoint.manifest import Manifest
from penstock.errors import RunError
from penstock.front import Pipeline
from penstock.front.companions import same_random_numbers
from penstock.integrations.adapters import refuse_adapter
from penstock.integrations.data_numbers import DataNumbers, draw_from
from penstock.integrations.hf_model import is_of_transformers
from penstock.integrations.needs import needed
from penstock.nest import Value

needed("lightning", "lightning")
from lightning.fabric.utilities.seed import pl_worker_init_function  # noqa: E402  the line above says what is missing
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

from penstock.integrations.lightning_steps import LoggedSteps, Means, Stand  # noqa: E402  needs torchmetrics, which lightning brings

__all__ = ["PipelineStrategy"]
_METHODS = {TrainerFn.FITTING: "training_step", TrainerFn.VALIDATING: "validation_step", TrainerFn.TESTING: "test_step"}
_PARTS, _REST = "pipeline", "meta-{}.pt"  # in the folder of a checkpoint


class PipelineStrategy(DDPStrategy):
    """All processes of a Trainer together hold one model, and see the same batches.

        trainer = lightning.Trainer(devices=2, strategy=PipelineStrategy(model="net", microbatches=8, schedule="zbv"))

    `model` is the name of the attribute of the LightningModule that is cut into stages. Its steps are written as ever: they call
    that model once, and compute a loss from what it returns. The call is the pipeline; what comes after it runs on the
    last stage, for each microbatch; what is logged there is logged everywhere, as the mean over the microbatches.

    A LightningModule may have the method `pipeline_example()`: a batch to trace the model with, in place of the first one of the
    loader. With `whole_outputs=True` what comes after the call in `validation_step` and `test_step` runs on every rank, with the
    output of the whole batch. `loss_weight(batch)` counts what the loss of a batch is a mean of, if that is not its rows; the
    own loss of a model of transformers needs none. All other options are those of `penstock.Pipeline`.
    `strategy.pipe` is the pipeline.
    """

    def __init__(
        self,
        model: str = "model",
        *,
        whole_outputs: bool = False,
        loss_weight: Callable[[Value], Value] | None = None,
        process_group_backend: str | None = None,
        **options: Value,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend)
        self._name = model
        self._whole_outputs = whole_outputs
        self._loss_weight = loss_weight
        self._pipeline_options = options
        self._steps: LoggedSteps | None = None
        self._trainer: Value = None

    @property
    def pipe(self) -> Pipeline:
        """The pipeline, from the start of `fit` on."""
        return self._begun.pipe

    @property
    def _begun(self) -> LoggedSteps:
        if self._steps is None:
            raise RunError(
                "there is no pipeline before trainer.fit(...), validate(...), test(...) or predict(...) began"
            )
        return self._steps

    # -- making it

    def setup(self, trainer: Value) -> None:
        assert self.accelerator is not None
        _refuse_averages(trainer)
        self.accelerator.setup(trainer)
        self._trainer = trainer
        trainer._accelerator_connector.use_distributed_sampler = False  # it would give each process other rows
        if self._steps is None or not isinstance(getattr(self.lightning_module, self._name, None), Stand):
            self._steps = self._made(trainer)
        self.model_to_device()  # what is beside the stages
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if not trainer.lightning_module.automatic_optimization:
                raise RunError(
                    "automatic_optimization=False: a pipeline runs forward and backward together, so that manual_backward has "
                    "nothing to do. Leave it to the Trainer, or write the loop with penstock.Pipeline"
                )
            if len(self.optimizers) > 1:
                raise RunError(f"{len(self.optimizers)} optimizers; a pipeline has one, with groups of parameters")
        self._begun.numbers = DataNumbers(self.pipe)
        self._begun.numbers.begin()
        self.setup_precision_plugin()
        own: Value = self.precision_plugin
        own.clip_grad_by_norm = lambda optimizer, clip_val: self.pipe.clip_grad_norm_(float(clip_val))
        module: Value = self.lightning_module
        module.optimizer_zero_grad = lambda *given, **more: None  # see training_step

    def _made(self, trainer: Value) -> LoggedSteps:
        module: Value = self.lightning_module
        model = getattr(module, self._name, None)
        if not isinstance(model, nn.Module):
            raise RunError(
                f"{type(module).__name__}.{self._name} is {type(model).__name__}; expected the nn.Module that is cut into "
                f'stages. Say which attribute it is: PipelineStrategy(model="...")'
            )
        self.precision_plugin.convert_module(module)
        with same_random_numbers(torch.device("cpu")):
            example = self.precision_plugin.convert_input(self._example(trainer))
        method = _METHODS.get(trainer.state.fn, "predict_step")
        if self._pipeline_options.get("mesh") is not None:
            raise RunError(
                "PipelineStrategy(mesh=...): every process gets the rows of the loader, so replicas would do the same work. "
                "Leave it out; penstock.Pipeline(mesh=...) has replicas"
            )
        return self._piped(module, self.batch_to_device(example, self.root_device), method)

    def _piped(self, module: Value, batch: Value, method: str) -> LoggedSteps:
        """Puts the pipeline into the place of the model: the steps of the module around it."""
        model, stand, given = getattr(module, self._name), Stand(), dict(self._pipeline_options)
        refuse_adapter(model)
        scaled, spec = given.pop("scale_grads", True), given.pop("target_chunk_spec", None)
        means = Means(self._loss_weight, scaled=scaled, spec=spec)
        setattr(module, self._name, stand)
        steps = LoggedSteps(module, stand, means)
        args, kwargs = steps.call_of(method, batch, 0)
        scaler = getattr(self.precision_plugin, "scaler", None)  # of 16-mixed: Lightning unscales and steps by itself
        options = {
            "device": given.get("device") or self.root_device,
            "loss_scale": scaler,
            "few_rows": True,
            **given,
            "scale_grads": False,  # the steps weigh their losses themselves
            "target_chunk_spec": None if means.spec is None else (means.spec, None),
        }
        make = partial(Pipeline, model, args, example_kwargs=kwargs, loss_fn=steps.loss)
        if is_of_transformers(model):
            from penstock.integrations import transformers as hf

            means.of_labels, means.shifted = True, hf.shifts_labels(model)
            named = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
            steps.pipe = hf.made_with(make, model, named, options)
        else:
            steps.pipe = make(**options)
        stand.stages = nn.ModuleList(stage.submod for stage in steps.pipe.stages)
        return steps

    def _example(self, trainer: Value) -> Value:
        own = getattr(self.lightning_module, "pipeline_example", None)
        if own is not None:
            return own()
        loop = trainer.fit_loop if trainer.state.fn == TrainerFn.FITTING else trainer._active_loop
        loader = loop._data_source.dataloader()
        return next(iter(loader[0] if isinstance(loader, list | tuple) else loader))

    def process_dataloader(self, dataloader: object) -> object:
        """Every rank has the batches of the user's loader; whatever is drawn for them, all draw alike."""
        loader: Value = dataloader
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(loader, "worker_init_fn", self) is None:
            loader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # Lightning would seed workers by the rank
        if self._begun.numbers is not None:
            draw_from(self._begun.numbers, loader)
        return loader

    def teardown(self) -> None:
        if self._steps is not None and self._steps.numbers is not None:
            self._steps.numbers.end()
        super().teardown()

    # -- steps

    def training_step(self, batch: Value, batch_idx: int = 0, *more: Value, **given: Value) -> Value:
        """A pipeline runs forward and backward together, so gradients are set to zero before the step and not after it."""
        every = int(self._trainer.accumulate_grad_batches)
        if batch_idx % every == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        with self.precision_plugin.train_step_context():
            return self._begun.run("training_step", batch, batch_idx, *more, divide=every)

    def backward(self, closure_loss: Tensor, optimizer: object, *args: Value, **kwargs: Value) -> Tensor:
        return closure_loss

    def _evaluated(self, method: str, precision: str, *args: Value, **kwargs: Value) -> Value:
        steps = self._begun
        run = steps.whole if self._whole_outputs or method == "predict_step" else steps.run
        with getattr(self.precision_plugin, precision)():
            return run(method, *args, **kwargs)

    validation_step = partialmethod(_evaluated, "validation_step", "val_step_context")
    test_step = partialmethod(_evaluated, "test_step", "test_step_context")
    predict_step = partialmethod(_evaluated, "predict_step", "predict_step_context")

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Value]:
        """The pipeline writes its own part of a checkpoint."""
        return {}

    def optimizer_state(self, optimizer: object) -> dict[str, Tensor]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Value], filepath: object, storage_options: object = None) -> None:
        """A folder: what Lightning knows in one file, and a checkpoint of penstock's for any number of processes."""
        folder = Path(self.broadcast(str(filepath)))

        def write() -> str:  # under a name of its own: nothing refers to it before the pipeline's part is there whole
            rest = _REST.format(uuid4().hex)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(checkpoint, folder / rest)
            return rest

        rest = self.pipe.ranks.broadcast(f"writing to {folder}", write)
        extra = {"rest": rest, "data": None if self._begun.numbers is None else self._begun.numbers.dumps()}
        self.pipe.save(folder / _PARTS, optimizer=next(iter(self.optimizers), None), extra=extra)
        if self.pipe.is_first:
            for other in set(folder.glob(_REST.format("*"))) - {folder / rest}:
                other.unlink(missing_ok=True)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Value]:
        folder = Path(checkpoint_path)
        if not (folder / _PARTS).is_dir():
            raise RunError(
                f"{folder} is no checkpoint of a PipelineStrategy; expected a folder with {_REST.format('...')} and {_PARTS}/"
            )
        found: list[dict[str, Value]] = []
        self.pipe.ranks.try_all(
            f"reading {folder}", lambda: found.append(_rest_of(folder, safely=weights_only is not False))
        )
        extra = self.pipe.load(folder / _PARTS, optimizer=next(iter(self.optimizers), None))
        if self._begun.numbers is not None and isinstance(extra.get("data"), str):
            self._begun.numbers.loads(extra["data"])
        return found[0]

    def load_model_state_dict(self, checkpoint: Mapping[str, Value], strict: bool = True) -> None:
        """Done by `load_checkpoint`."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Value]) -> None:
        """Done by `load_checkpoint`."""


def _rest_of(folder: Path, *, safely: bool) -> dict[str, Value]:
    """What Lightning knows. The file is named in the manifest, which may be anybody's; so it may be none of another folder, and
    it runs nothing unless the caller of the Trainer said weights_only=False."""
    name = Manifest.read(kept.candidates(folder / _PARTS)[0]).extra.get("rest")
    if not isinstance(name, str) or not re.fullmatch(_REST.format("[0-9a-f]{32}").replace(".", r"\."), name):
        raise RunError(f"{folder} names {name!r:.80} as Lightning's part; expected {_REST.format('...')}")
    try:
        found: dict[str, Value] = torch.load(folder / name, map_location="cpu", weights_only=safely)
    except Exception as error:  # torch's reader raises whatever the bytes lead it to
        hint = "; if you trust who wrote it: trainer.fit(..., weights_only=False)" if safely else ""
        raise RunError(f"{folder / name} cannot be read: {type(error).__name__}: {error}{hint}") from error
    return found


def _refuse_averages(trainer: Value) -> None:
    """Callbacks that copy the whole model before it is cut into stages."""
    for callback in trainer.callbacks:
        if {"StochasticWeightAveraging", "WeightAveraging"} & {kind.__name__ for kind in type(callback).__mro__}:
            raise RunError(
                f"{type(callback).__name__} keeps a copy of the whole model, and each rank of a pipeline has its own stages. "
                "Leave it out; a callback of your own may average strategy.pipe.named_parameters() on each rank"
            )
