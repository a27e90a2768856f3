"""`transformers.Trainer` around a pipeline: the processes of a replica together hold one model, and see the same batches.

    trainer = PipelineTrainer(model=model, args=args, train_dataset=data, pipeline_options={"microbatches": 8})
    trainer.train()                                   # torchrun --nproc-per-node 2 program.py

What differs from a Trainer is in the methods below, and nothing else: who gets which batch, what a step is, how long a
gradient is, and what is written and read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from penstock.checkpoint.weight_files import open_weights
from penstock.errors import RunError
from penstock.front.companions import same_random_numbers
from penstock.front.loading import copy_state
from penstock.front.spread import Result, Where
from penstock.integrations.adapters import adapter_weights, is_adapted
from penstock.integrations.data_numbers import DataNumbers, draw_from
from penstock.integrations.hf_batches import ITEMS, count_labels
from penstock.integrations.needs import needed
from penstock.integrations.transformers import TransformersPipeline, without_loss
from penstock.lower import recompute
from penstock.nest import Value
from penstock.plan.ops import Op

_Trainer: Value = needed("transformers", "hf").Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler  # noqa: E402  the line above says what is missing

_NOT_HERE = "bf16_full_eval debug deepspeed fp16_full_eval fsdp neftune_noise_alpha parallelism_config use_liger_kernel"
_NUMBERS = "data_rng_state_{}.json"  # in a checkpoint, of a replica: what its data is drawn from
_STATE = "pipeline"  # the folder in a checkpoint that has weights, optimizer and scheduler for any number of stages


class PipelineTrainer(_Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer that trains a pipeline.

        trainer = PipelineTrainer(model=model, args=args, train_dataset=data, pipeline_options={"microbatches": 8})
        trainer.train(resume_from_checkpoint=True)

    `model` is a model of transformers or peft, or a `TransformersPipeline` that `pipeline(...)` made, for instance of a folder
    that no host could hold. `pipeline_options` are those of `pipeline`, with a `mesh` of "dp" and "pp" also replicas.
    `per_device_train_batch_size` is the batch of a pipeline, which it cuts into microbatches; all other arguments mean what
    they mean to a Trainer, and `gradient_checkpointing` is a part of the plan. `trainer.pipe` is the pipeline,
    `trainer.model` this rank's part of the model.
    """

    def __init__(
        self,
        model: nn.Module | TransformersPipeline,
        args: Value = None,
        *,
        pipeline_options: Mapping[str, Value] | None = None,
        **options: Value,
    ) -> None:
        made = model if isinstance(model, TransformersPipeline) else None
        whole = model.shell if isinstance(model, TransformersPipeline) else model
        super().__init__(model=whole, args=args, **options)
        self._check_arguments()
        given = {"device": self.args.device, **(pipeline_options or {})}
        if self.args.gradient_checkpointing:
            given.setdefault("recompute", True)
        if self.args.torch_compile:
            mode = {"mode": self.args.torch_compile_mode} if self.args.torch_compile_mode else {}
            given.setdefault("compile", {"backend": self.args.torch_compile_backend, **mode})
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            given.setdefault("loss_scale", scaler)
        loss_fn = self._loss_fn()
        self._counts_items = made is None and loss_fn is not None
        if self._counts_items:
            given["scale_grads"] = False  # the loss of a microbatch is divided by the labels of the whole batch
        if made is None:
            with same_random_numbers(torch.device("cpu")):  # a run is that of a Trainer without a pipeline
                made = TransformersPipeline(whole, self._example(), loss_fn=loss_fn, **given)
        else:
            self._check_made(pipeline_options, scaler)
            if self.args.gradient_checkpointing and not made.plan.has(Op.R):
                made.run_plan(recompute(made.plan))
        if made.num_ranks * made.num_replicas != self.args.world_size:
            raise RunError(
                f"the pipeline has {made.num_ranks} ranks in {made.num_replicas} replicas, and there are {self.args.world_size} "
                'processes; for replicas give pipeline_options={"mesh": init_device_mesh(..., mesh_dim_names=("dp", "pp"))}'
            )
        self.pipe = made
        self._outputs: Where = "all"  # on which ranks a prediction wants them
        self.model = self.model_wrapped = self.callback_handler.model = made.shell
        self.is_distributed_loading_by_transformers = True  # nobody wraps the model in DDP
        self.accelerator.prepare_model = self._left_alone
        self.accelerator.backward = lambda loss, **options: None  # see compute_loss
        self.accelerator.gather = made.gather_rows  # what a rank has, all of its replica have
        self._numbers = DataNumbers(made)
        share = _Replica(self.accelerator, made)
        self.accelerator.prepare_data_loader = partial(self._prepared_loader, share)

    # -- the model and its data

    def _example(self) -> dict[str, Value]:
        """A batch, as the collator makes it."""
        dataset = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        if dataset is None:
            raise RunError(
                "a PipelineTrainer without train_dataset and eval_dataset; make the pipeline with pipeline(...)"
            )
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset)
        collate = self._get_collator_with_removed_columns(self.data_collator)
        loader = DataLoader(dataset, max(2, self.args.train_batch_size), collate_fn=collate)
        return dict(self._prepare_inputs(dict(next(iter(loader)))))

    def _check_arguments(self) -> None:
        """What a Trainer does to a whole model, or to a rank's own rows, would here be done to nothing."""
        asked = {name: getattr(self.args, name, None) for name in _NOT_HERE.split()}
        asked['train_sampling_strategy="batch_rebalance"'] = self.args.train_sampling_strategy == "batch_rebalance"
        asked["model_init"] = self.model_init
        asked["an overridden compute_loss"] = type(self).compute_loss is not PipelineTrainer.compute_loss
        hint = (
            "Leave them out; compute_loss_func= takes the place of compute_loss, and "
            'pipeline_options={"mesh": ..., "data_parallel": "fsdp"} that of fsdp and deepspeed'
        )
        _refuse("", asked, hint)

    def _check_made(self, options: Mapping[str, Value] | None, scaler: object) -> None:
        """A pipeline that is there already has a loss and options of its own."""
        asked = {
            "pipeline_options": options,
            "compute_loss_func": self.compute_loss_func,
            "label_smoothing_factor": self.label_smoother,
            "fp16": scaler,
            "torch_compile": self.args.torch_compile,
        }
        instead = "pipeline_options={...}, or make the pipeline with them: pipeline(..., loss_fn=..., loss_scale=...)"
        _refuse("a ready-made pipeline and ", asked, f"Give the model and {instead}")

    def _loss_fn(self) -> Callable[..., Tensor] | None:
        """None: the model's own."""
        smooth = self.label_smoother and partial(self.label_smoother, shift_labels=self._loss_shifts_labels)
        given = self.compute_loss_func or smooth
        return given and (lambda outputs, labels, items=None: given(outputs, labels, num_items_in_batch=items))

    def _left_alone(self, model: nn.Module, *args: Value, **options: Value) -> nn.Module:
        """accelerate would move and wrap the model, most of which has no memory here; it only hears of it."""
        self.accelerator._models.append(model)
        return model

    def _prepared_loader(self, share: _Replica, loader: Value, *args: Value, **options: Value) -> Value:
        """All ranks of a replica draw the same batches, also in worker processes, which a Trainer seeds by the rank."""
        init = getattr(loader, "worker_init_fn", None)
        if isinstance(init, partial) and "rank" in init.keywords:
            loader.worker_init_fn = partial(init, rank=self.pipe.replica)
        with self._numbers.drawing():
            sampler = getattr(loader, "sampler", None)
            if self.pipe.num_replicas > 1 and isinstance(sampler, LengthGroupedSampler) and sampler.generator is None:
                seed = int(
                    torch.empty((), dtype=torch.int64).random_()
                )  # what collators draw may differ between replicas
                sampler.generator = torch.Generator().manual_seed(seed)
            prepared = type(self.accelerator).prepare_data_loader(share, loader, *args, **options)
        draw_from(self._numbers, getattr(prepared, "base_dataloader", prepared))
        return prepared

    def get_batch_samples(self, *args: Value, **options: Value) -> Value:
        """Also where a resumed run passes over batches, for which accelerate makes another loader."""
        with self._numbers.drawing():
            return super().get_batch_samples(*args, **options)

    def train(self, *args: Value, **options: Value) -> Value:
        with self._numbers.shared():
            return super().train(*args, **options)

    def evaluation_loop(self, *args: Value, **options: Value) -> Value:
        with self._numbers.shared():
            return super().evaluation_loop(*args, **options)

    def get_total_train_batch_size(self, args: Value) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.pipe.num_replicas)

    def floating_point_ops(self, inputs: dict[str, Value]) -> float:
        """Those of a rank: a Trainer adds them up over all processes, and each of these knows the size of the whole model."""
        return float(super().floating_point_ops(inputs)) / self.pipe.num_ranks

    def _move_model_to_device(self, model: nn.Module, device: object) -> None:
        """Only stages are on the device."""

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Each process has parameters of its own."""

    # -- steps

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Value:
        """accelerate would wrap the model in it, which is left alone."""
        return self.accelerator.autocast()

    def compute_loss(
        self, model: object, inputs: Mapping[str, Value], return_outputs: bool = False, num_items_in_batch: Value = None
    ) -> Value:
        """A step of the pipeline, in training with its backward: a Trainer's own has nothing left to do."""
        batch, items = dict(inputs), num_items_in_batch
        if self._counts_items:
            counted = count_labels(batch, shifted=self._loss_shifts_labels) if items is None else items
            batch["loss_kwargs"] = {"items": counted}
        elif self.pipe.own_loss and items is not None:
            batch[ITEMS] = items
        # What the mean over the replicas is multiplied by, if each divides its loss by the labels of all of them.
        part = self.pipe.num_replicas if items is not None and self.args.average_tokens_across_devices else 1
        if return_outputs:
            result = self.pipe.evaluate(**batch, outputs=self._outputs)
            outputs = {} if result.outputs is None else without_loss(result.outputs)
            return self._on_device(result, part), outputs
        scaled = self.loss_is_scaled_for_ga  # else the Trainer divides what is returned, by the batches of a step
        if scaled is None:
            divided = self.model_accepts_loss_kwargs and items is not None
            scaled = divided or self.compute_loss_func is not None
        self.pipe.train()
        result = self.pipe.step(**batch, loss_factor=part if scaled else 1 / self.current_gradient_accumulation_steps)
        return self._on_device(result, part if scaled else 1)

    def _on_device(self, result: Result, part: float) -> Tensor:
        """The loss where the Trainer adds it up; the host does not wait for it."""
        assert result.loss_tensor is not None, "losses are shared"
        return (result.loss_tensor * part).to(self.args.device, torch.get_default_dtype())

    def prediction_step(
        self, model: object, inputs: Value, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Value:
        self._outputs = None if prediction_loss_only else "all"
        return super().prediction_step(self.pipe.predict, inputs, prediction_loss_only, ignore_keys)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        self.accelerator.unscale_gradients(self.optimizer)
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # -- what is written and read

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`; every process calls it, and writes its own stages."""
        folder = Path(output_dir or self.args.output_dir)
        self.pipe.save_pretrained(folder)
        if self.args.should_save:
            tokens = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokens is not None:
                tokens.save_pretrained(str(folder))
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.pipe.save(Path(output_dir) / _STATE, optimizer=self._inner_optimizer, scheduler=self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / _STATE).is_dir():
            self.pipe.load(Path(checkpoint) / _STATE, optimizer=self._inner_optimizer, scheduler=self.lr_scheduler)
        elif checkpoint is not None and (Path(checkpoint) / "optimizer.pt").is_file():
            raise RunError(
                f"{checkpoint} has the optimizer of a Trainer without a pipeline, which no rank could take its part of; give its "
                "weights as the model, pipeline(checkpoint, batch), and begin anew"
            )

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        text = self._numbers.dumps()
        if text is not None and self.pipe.rank == 0:
            (Path(output_dir) / _NUMBERS.format(self.pipe.replica)).write_text(text)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            file = Path(checkpoint) / _NUMBERS.format(self.pipe.replica)
            self._numbers.loads(file.read_text() if self.pipe.rank == 0 and file.is_file() else None)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_adapted(self.pipe.shell):
            copy_state(self.pipe.tensors, adapter_weights(resume_from_checkpoint, self.pipe), strict=False)
        else:
            self.pipe.load_state_dict(open_weights(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    @property
    def _inner_optimizer(self) -> Value:
        """accelerate wraps it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


class _Replica:
    """An Accelerator for its data loaders: it would give each process batches of its own, and here each replica has its own."""

    dispatch_batches = False  # every process reads the data

    def __init__(self, accelerator: Value, pipe: TransformersPipeline) -> None:
        self._accelerator, self.num_processes, self.process_index = accelerator, pipe.num_replicas, pipe.replica

    def __getattr__(self, name: str) -> object:
        return getattr(self._accelerator, name)


def _refuse(beside: str, asked: Mapping[str, Value], hint: str) -> None:
    """Say which of these were asked for in vain."""
    if lost := [name for name, value in asked.items() if value]:
        raise RunError(f"PipelineTrainer with {beside}{', '.join(lost)}: it would not heed them. {hint}")
