"""Hugging Face models in a pipeline, and `transformers.Trainer` around it.

    pipe = pipeline("llama/", batch, microbatches=8)                # a folder: loaded stage by stage
    pipe = pipeline(LlamaForCausalLM, batch, config=config)         # a class: initialised stage by stage
    pipe = pipeline(model, batch)                                   # a model, also one of peft
    loss = pipe.step(**batch).loss

docs/integrations/transformers.md has the whole story. pip install "penstock[hf]".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.batch import Replicate
from penstock.batch.policy import RowPolicy
from penstock.errors import CaptureError, RunError
from penstock.front import Pipeline, Result
from penstock.front.publish import Origin
from penstock.integrations import hf_batches, hf_model
from penstock.integrations.adapters import base_of, is_adapted, puts_prompt_first, refuse_adapter, save_adapter
from penstock.integrations.hf_batches import ITEMS
from penstock.integrations.hf_model import Source, on_meta
from penstock.integrations.needs import needed
from penstock.nest import Value, map_tensors
from penstock.plan import Plan
from penstock.schedules import Recipe, get_schedule
from penstock.stage.pipeline_stage import place_in

if TYPE_CHECKING:
    from penstock.integrations.hf_trainer import PipelineTrainer

__all__ = ["PipelineTrainer", "TransformersPipeline", "pipeline"]
Made = TypeVar("Made")
_OPTIONS = ("target", "outputs", "loss_kwargs", "loss_factor")  # of steps, which stand among the arguments of the model


def pipeline(
    source: Source,
    example: Mapping[str, Value],
    *,
    config: Value = None,
    loss_fn: Callable[..., Tensor] | None = None,
    schedule: str | Plan | Recipe = "1f1b",
    **options: Value,
) -> TransformersPipeline:
    """A model of transformers as a Pipeline, ready to train; every rank makes the same call.

        pipe = pipeline("llama/", batch, microbatches=8)
        pipe.step(input_ids=ids, attention_mask=mask, labels=labels)

    `source`    a folder with config.json and (sharded) safetensors, a class with `config`, or a model. The first two are made
                on the meta device, and each rank reads or initialises its own stages alone: none ever holds the whole model.
    `example`   a batch as the collator makes it: at least two rows. Later ones may have other numbers of rows and lengths.
    `loss_fn`   ``loss_fn(outputs, labels)``, in place of the model's own loss.
    `options`   those of `penstock.Pipeline`: microbatches, num_stages, mesh, weights, recompute, ...

    Where the config says how the model can be cut (`base_model_pp_plan`), and the number of stages is known, it is cut there.
    """
    model, folder = hf_model.found(source, config)
    return TransformersPipeline(model, example, loss_fn=loss_fn, schedule=schedule, **{"weights": folder, **options})


class TransformersPipeline(Pipeline):
    """The `Pipeline` that `pipeline` makes.

    pipe.step(**batch).loss, pipe.evaluate(**batch).loss, pipe.predict(**batch)["logits"]

    The loss of a batch is that of the unsplit model: with labels of which some do not count (-100), each microbatch
    counts by those that do.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Mapping[str, Value],
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        schedule: str | Plan | Recipe = "1f1b",
        **options: Value,
    ) -> None:
        needed("transformers", "hf")
        refuse_adapter(model)
        self.own_loss = loss_fn is None
        self.shell = on_meta(model)
        self._shifts = shifts_labels(model)
        packed = example.get("position_ids") is not None
        batch = {name: value for name, value in example.items() if not packed or name not in hf_batches.BOUNDS}
        if not self.own_loss:
            batch.pop("labels", None)
        if _takes(model, "use_cache"):
            batch.setdefault("use_cache", False)
        if self.own_loss and "labels" in batch and _takes(model, ITEMS):
            batch.setdefault(ITEMS, torch.ones((), dtype=torch.long, device=batch["labels"].device))
        self._example = {n: v.to("meta") if isinstance(v, Tensor) else None for n, v in batch.items()}
        given = {**options, "schedule": schedule, "example_kwargs": batch}
        if ITEMS in batch:
            given["kwargs_chunk_spec"] = {ITEMS: Replicate(), **(options.get("kwargs_chunk_spec") or {})}
        made_with(partial(super().__init__, model, loss_fn=loss_fn), model, batch, given)
        self._enter_shell()

    # -- steps

    def step(self, *args: Value, **batch: Value) -> Result:
        """One training step; `batch` as the model would be called with, and the options of `Pipeline.step`.

        loss = pipe.step(input_ids=ids, labels=labels).loss
        """
        return super().step(*args, **self._apart(self._call(batch)))

    def evaluate(self, *args: Value, **batch: Value) -> Result:
        """The loss of a batch, without gradients and in evaluation mode; with the options of `Pipeline.evaluate`.

        loss = pipe.evaluate(**batch).loss
        """
        return super().evaluate(*args, **self._apart(self._call(batch)))

    def predict(self, *args: Value, **batch: Value) -> Value:
        """The model's outputs for a batch without its loss, in evaluation mode, on every rank (or where `outputs=` says).

        logits = pipe.predict(input_ids=ids)["logits"]
        """
        return without_loss(super().predict(*args, **self._call(batch)))

    def gather_rows(self, tree: Value) -> Value:
        """The rows that each replica has, one after another, on all of them: every rank calls it, with as many rows."""
        if self.num_replicas == 1:
            return tree

        def gathered(tensor: Tensor) -> Tensor:
            mine = torch.atleast_1d(tensor.detach()).contiguous()
            found = [torch.empty_like(mine) for _ in range(self.num_replicas)]
            dist.all_gather(found, mine, group=self._ends.copies)
            return torch.cat(found)

        with self._ends.among_replicas():
            return map_tensors(gathered, tree)

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write what `from_pretrained` reads: the model, or of a peft model its adapter. All ranks call it."""
        if is_adapted(self.shell):
            save_adapter(folder, self)
        else:
            super().save_pretrained(folder, max_shard_bytes=max_shard_bytes)

    # -- inside

    def _call(self, given: dict[str, Value]) -> dict[str, Value]:
        """What the pipeline is called with: the model's arguments, and the options that stood among them."""
        options = {name: given.pop(name) for name in _OPTIONS if name in given}
        if self.own_loss and options.get("target") is not None:
            raise RunError(
                "step(target=...) with a model that computes its own loss; give labels=, or pipeline(loss_fn=...)"
            )
        if not self.own_loss and (labels := given.pop("labels", None)) is not None:
            options.setdefault("target", labels)
        call = hf_batches.completed(given, self._example)
        if "use_cache" in self._example:
            call["use_cache"] = False
        if ITEMS in self._example and not isinstance(call.get(ITEMS), Tensor):
            count = call.get(ITEMS) or hf_batches.count_labels(call, shifted=self._shifts) or 1
            call[ITEMS] = torch.tensor(int(count), device=self._ends.device)
        return {name: call[name] for name in self._example if name in call} | options  # in the order of the example

    def _apart(self, call: dict[str, Value]) -> dict[str, Value]:
        """A packed row is cut between its texts, if its microbatches can be weighed and nobody wants its outputs in one row."""
        weighed = (self.own_loss or not self._of_steps.scale_grads) and hf_batches.keeps_texts_apart(self.shell)
        if not weighed or not self._of_steps.few_rows or call.get("outputs") is not None:
            return call
        return hf_batches.texts_apart(call, self.schedule.num_microbatches, shifted=self._shifts or not self.own_loss)

    def _make_policy(self) -> RowPolicy:
        policy, info = super()._make_policy(), self._built.info
        if (
            ITEMS in self._example
            and info is not None
            and ITEMS in {one.name for wires in info.stage_inputs for one in wires}
        ):
            return replace(policy, mean=False)  # the model divides by the number of labels in the batch
        if policy.weight_of is None or self._of_steps.loss_weight is not None:
            return policy
        return replace(policy, weight_of=partial(hf_batches.label_shares, policy.weight_of))

    def _enter_shell(self) -> None:
        """The shell holds this rank's parameters; the others stay on the meta device, and are not trained from here."""
        spellings = self.tensors.spellings
        mine = {spelled: one for name, one in self.tensors.all_parameters() for spelled in spellings(name)}
        for name, parameter in list(self.shell.named_parameters(remove_duplicate=False)):
            owner, _, leaf = name.rpartition(".")
            if name in mine:
                setattr(self.shell.get_submodule(owner), leaf, mine[name])
            else:
                parameter.requires_grad_(False)
        self._origin = replace(self._origin, configs=Origin.of(self.shell).configs)  # what is changed there is saved


def without_loss(outputs: Value) -> Value:
    """What a model gives apart from its loss."""
    if not isinstance(outputs, dict):
        return outputs
    kept = {name: value for name, value in outputs.items() if name != "loss" and value is not None}
    return outputs if len(kept) == len(outputs) else type(outputs)(kept)


def made_with(
    make: Callable[..., Made], model: Value, batch: Mapping[str, Value], options: Mapping[str, Value]
) -> Made:
    """What `make` makes of a model of transformers with these options, and with what suits it where they say nothing.

    Rows and lengths of the batch are left open; if that cannot be, the length is the example's. The plan recomputes what the
    model has checkpoints for, so it goes without them meanwhile.
    """
    given = _with_defaults(model, options)
    given.setdefault("recompute", bool(getattr(model, "is_gradient_checkpointing", False)))
    checkpoints = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in checkpoints:
        module.gradient_checkpointing = False
    try:
        if "dynamic_shapes" not in given:
            with suppress(CaptureError):
                return make(**given, dynamic_shapes=hf_batches.open_sizes(batch))
        return make(**given)
    finally:
        for module in checkpoints:
            module.gradient_checkpointing = True


def _with_defaults(model: nn.Module, options: Mapping[str, Value]) -> dict[str, Value]:
    """Where to cut, and where values come from, unless that was said."""
    given = {"few_rows": True, **options}  # a loader's last batch may be a short one, and every rank has it
    count = given.get("num_stages") or given.get("stages") or _stages_of(given)
    if isinstance(count, int) and given.get("split_spec") is None and given.get("split_policy") is None:
        cuts = hf_model.cuts_of_plan(model, count)
        if cuts is not None:
            given = {"profile": False, **given, "num_stages": None, "stages": None, "split_spec": cuts}
    files = given.get("weights") is not None
    if files and not is_adapted(model):
        given["weights"] = hf_model.as_the_model_names_them(given["weights"], model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        given.setdefault("init", hf_model.module_values(model, given.get("seed", 0), only_missing=files))
        if files and is_adapted(model):
            given["weights"] = hf_model.as_peft_names_them(given["weights"], model)
    return given


def _stages_of(options: Mapping[str, Value]) -> int | None:
    """How many stages the schedule has, if that is known before the model is measured."""
    schedule = options.get("schedule", "auto")
    if isinstance(schedule, Plan):
        return schedule.num_stages
    if schedule in ("auto", "search"):
        return None
    recipe = schedule if isinstance(schedule, Recipe) else get_schedule(schedule)
    mesh = options.get("mesh")
    ranks = mesh["pp"].size() if mesh is not None else place_in(options.get("group"))[1]
    return ranks * (recipe.stages_per_rank or 1)


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(base_of(model).forward).parameters.values()
    return any(p.name == name or (name == ITEMS and p.kind is p.VAR_KEYWORD) for p in parameters)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's own loss compares each token with the next label."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    inner = base_of(model)
    if is_adapted(model) and puts_prompt_first(model):
        return False  # the last token of the prompt predicts the first label
    kind = LOSS_MAPPING.get(getattr(inner, "loss_type", None) or "", ForCausalLMLoss)  # as transformers takes it
    return kind is ForCausalLMLoss and not getattr(inner.config, "is_encoder_decoder", False)


def __getattr__(name: str) -> object:
    if name == "PipelineTrainer":
        from penstock.integrations.hf_trainer import PipelineTrainer

        return PipelineTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
