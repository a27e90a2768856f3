"""The parts of a step, each under the name by which programs call or override it: splitting, checking, losses, merging."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.batch import Microbatches, TensorChunkSpec, batch_size_of, merge_chunks, split_batch
from penstock.errors import RunError, SplitError
from penstock.nest import Value
from penstock.run.schedule import Schedule
from penstock.stage.pipeline_stage import PipelineStage


class Parts(Schedule):
    """What a step is made of."""

    _internal_losses: list[Tensor | None]
    _loss_weights: Sequence[float | Tensor] | None = (
        None  # the share of each microbatch in the batch, while a step runs
    )

    def _step_microbatches(
        self,
        arg_mbs: list[Value] | None = None,
        kwarg_mbs: list[Value] | None = None,
        target_mbs: list[Value] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        """One step over a batch that is cut already. A subclass that overrides it drives the stages itself."""
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        rest = {"losses": losses, "return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        args, options = self._joined((), {**lists, **rest})
        return super().step(*args, **options)  # a step of the program's own may call this

    def _joined(self, args: tuple[Value, ...], options: dict[str, Value]) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """What `step` takes for a batch that is cut already, and given as lists."""
        arg_mbs, kwarg_mbs, target_mbs = (options.pop(name, None) for name in ("arg_mbs", "kwarg_mbs", "target_mbs"))
        if arg_mbs is not None or kwarg_mbs is not None or target_mbs is not None:
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, options.get("losses"))
            calls = Microbatches([(tuple(one), dict(kwargs)) for one, kwargs in zip(arg_mbs, kwarg_mbs, strict=True)])
            args = (calls,) if any(one or kwargs for one, kwargs in calls) else ()
            options["target"] = None if target_mbs is None else Microbatches(target_mbs)
        return args, options

    def _split_inputs(
        self, args: tuple[Value, ...], kwargs: dict[str, Value] | None = None
    ) -> tuple[list[tuple[Value, ...]], list[dict[str, Value]]]:
        """The arguments of each microbatch."""
        if not args and not kwargs:
            return [()] * self.num_microbatches, [{}] * self.num_microbatches
        return split_batch(
            args,
            kwargs,
            self.num_microbatches,
            args_spec=self._specs.args,
            kwargs_spec=self._row_specs(args, kwargs),
        )

    def _row_specs(self, args: tuple[Value, ...], kwargs: Mapping[str, Value] | None) -> object:
        """The specs for keyword arguments: a tensor with a row for each microbatch, and not for each sample, is told so."""
        specs, size = self._specs.kwargs, self.num_microbatches
        if not kwargs or size == 1 or not (specs is None or isinstance(specs, Mapping)):
            return specs
        rows = [
            name
            for name, value in kwargs.items()
            if isinstance(value, Tensor) and value.dim() and value.size(0) == size and name not in (specs or {})
        ]
        if not rows or batch_size_of(args, kwargs, args_spec=self._specs.args, kwargs_spec=specs) in (None, size):
            return specs
        warnings.warn(
            f"keyword argument {', '.join(rows)} of step() has {size} rows, one for each microbatch, which gets its own. To hand "
            f"it to every microbatch whole, write kwargs_chunk_spec={{{rows[0]!r}: Replicate()}}",
            stacklevel=4,
        )
        return {**(specs or {}), **dict.fromkeys(rows, TensorChunkSpec(0))}

    def _merge_outputs(self, output_chunks: list[Value]) -> Value:
        return merge_chunks(output_chunks, self._specs.output)

    def _check_inputs(
        self,
        arg_mbs: list[Value] | None = None,
        kwarg_mbs: list[Value] | None = None,
        target_mbs: list[Value] | None = None,
        losses: list[Tensor] | None = None,
    ) -> tuple[list[Value], list[Value]]:
        """Each list must be one, of one entry a microbatch."""
        size = self.num_microbatches
        for name, given in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list, got {type(given).__name__}")
            if given is not None and len(given) != size:
                raise SplitError(f"{len(given)} {name} for {size} microbatches; Expecting {size} {name}")
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list, got {type(losses).__name__}")
        return [()] * size if arg_mbs is None else arg_mbs, [{}] * size if kwarg_mbs is None else kwarg_mbs

    def _compute_loss(self, output: Value, target: Value, loss_kwargs: Mapping[str, Value] | None = None) -> Tensor:
        assert self.loss_fn is not None, "only asked for with a loss"
        return self.loss_fn(output, target, **(loss_kwargs or {}))

    def _should_compute_loss(self, stage: PipelineStage) -> bool:
        return bool(stage.is_last and self.loss_fn is not None)

    def _maybe_compute_loss(
        self,
        stage: PipelineStage,
        output: Value,
        target_mbs: Value,
        mb_index: int,
        loss_kwargs: Mapping[str, Value] | None = None,
    ) -> None:
        """On the last stage, with a loss: compute and keep it."""
        if self._should_compute_loss(stage) and target_mbs is not None:
            missing = mb_index + 1 - len(self._internal_losses)
            self._internal_losses.extend([None] * missing)
            self._internal_losses[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: PipelineStage, mb_index: int) -> Tensor | None:
        """On the last stage: what its backward starts from, the loss by its weight in the batch."""
        if not self._should_compute_loss(stage):
            return None
        kept = self._internal_losses
        loss = kept[mb_index] if 0 <= mb_index < len(kept) else None
        if loss is None:
            there = [microbatch for microbatch, one in enumerate(kept) if one is not None]
            raise RunError(
                f"the loss of microbatch {mb_index} is not there; there are those of the microbatches {there}"
            )
        return loss if self._loss_weights is None else loss * self._loss_weights[mb_index]

    def _update_losses(self, stages: PipelineStage | Sequence[PipelineStage], losses: list[Tensor] | None) -> None:
        """Give the losses of the step to the user's list."""
        many = stages if isinstance(stages, Sequence) else [stages]
        if losses is not None and any(stage.is_last for stage in many):
            kept = [loss for loss in self._internal_losses if loss is not None]
            if kept and len(kept) != self.num_microbatches:
                raise RunError(f"{len(kept)} losses of {self.num_microbatches} microbatches; expected one each")
            losses[:] = [loss.detach().clone() for loss in kept]
        self._internal_losses.clear()
