"""A training run as seen from one rank: pipeline, check, train, and leave a checkpoint and a report behind."""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import nullcontext
from dataclasses import asdict
from threading import Event

from torch.distributed.device_mesh import init_device_mesh

from penstock.balance import Profile
from penstock.batch import batch_size_of
from penstock.checkpoint import kept
from penstock.errors import PenstockError
from penstock.front import Pipeline
from penstock.front.saving import DISK
from penstock.nest import Value
from penstock.show.summary import time_text
from penstock.train import run_report
from penstock.train.events import EventLog, Noted
from penstock.train.gpt import generate
from penstock.train.history import RANKS, History, Recovery, Recutter, keep_cut, kept_cut, loss_noted
from penstock.train.loggers import JsonLines
from penstock.train.meet import where_of
from penstock.train.screen import Screen
from penstock.train.traces import traced
from penstock.train.train_job import Job
from penstock.train.train_options import TrainOptions
from penstock.train.update import Update, check

LOG = "log.jsonl"
SEEDS_APART = 1_000_003  # replicas draw other random numbers, as the rows of one batch do
COLLECT_EVERY = 50  # steps between two collections of Python's garbage, on all ranks at once


class Run:
    """A training run, as seen from one rank."""

    def __init__(self, options: TrainOptions, job: Job, screen: Screen, stop: Event) -> None:
        self.options, self.job, self.screen, self.stop = options, job, screen, stop
        self.parent = os.getppid()
        self.unit = "tokens" if job.tokens else "rows"
        self.history = History()
        self.lost: float | None = None  # when a rank was, if this life of the run follows such a loss
        self.replica = int(os.environ.get("RANK", "0")) // self._ranks
        self.update = Update(options, job, replica=self.replica)
        self.recutter = Recutter(options.recut, options.checkpoint_every)
        # A restart must not go on from what an earlier run left in the folder.
        if screen.enabled and not options.resume:
            before = kept.put_aside(options.checkpoint, DISK)
            if before is not None:
                screen.say(f"the checkpoint of an earlier run is now {before}")
        elif screen.enabled:
            kept.clear_unfinished(options.checkpoint, DISK)  # the folder is this run's alone
        batch = job.batch(0)
        rows = job.tokens or batch_size_of(batch[0]) or options.batch
        self.rows = rows * options.accumulate  # of a step, or tokens
        self.example = self.update.share(batch)
        self._cut(kept_cut(options, self._ranks))
        self.log: EventLog | None = None
        self.lines: JsonLines | None = None  # of the first rank

    # -- before

    def _cut(self, kept: dict[str, Value]) -> None:
        """Make the pipeline and its optimizer; the model is cut as it was, where something is kept."""
        options, (args, target) = self.options, self.example
        sizes, device = (options.dp, self._ranks), where_of(options)
        mesh = None if options.dp == 1 else init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "pp"))
        self.screen.say(self.job.title)
        self.pipe = Pipeline(
            self.job.model,
            args,
            example_target=target,
            loss_fn=self.job.loss_fn,
            schedule=kept.get("schedule", options.schedule),
            microbatches=options.microbatches,
            num_stages=kept.get("stages", options.stages),
            profile=kept.get("profile", None if options.measure else False),
            rng="per-microbatch",
            seed=options.seed + self.replica * SEEDS_APART,
            mesh=mesh,
            data_parallel="fsdp" if options.data_parallel == "fsdp" else "ddp",
            loss_scale=self.update.scaler if self.update.scaler.is_enabled() else None,
            run_folder=options.folder,
            device=device,
            collect_every=COLLECT_EVERY,
            few_rows=True,
            compile={"backend": options.compile_backend} if options.compile else False,
        )
        self.screen.say(self.pipe.explain(print_output=False))
        if self.screen.enabled:
            keep_cut(self.pipe, options)
        self.rated = self.update.optimizer(self.pipe.parameters())

    @property
    def _ranks(self) -> int:
        """How many ranks one pipeline has."""
        size, dp = int(os.environ.get("WORLD_SIZE", "1")), self.options.dp
        if size % dp:
            raise PenstockError(f"{size} processes for --dp {dp}; expected a multiple of {dp}")
        return size // dp

    def _begin(self) -> int:
        """The step to begin with."""
        pids = self.pipe.ranks.all_gather("the process of each rank", os.getpid())
        if self.screen.enabled:
            (self.options.folder / RANKS).write_text(json.dumps(pids), encoding="utf-8")
        start = self._resume() if self.options.resume else 0
        # Steps are predicted by what they cost with all ranks at work.
        if self.options.measure and self.pipe.choice is not None:
            args, target = self.example
            with self.update.casting():
                took = time_text(self.pipe.calibrate(*args, target=target, rounds=5).predicted, "s")
            self.screen.say(f"by steps with all ranks at work: {took} a step is predicted, without the optimizer")
        if start == 0 and self.options.check_steps:
            self.history.checked = check(self.pipe, self.update)
            self.screen.say(str(self.history.checked))
        if self.screen.enabled:
            self.lines = JsonLines(self.options.folder, start, LOG)
            lost = loss_noted(self.options.folder)
            self.lost = lost if self.options.resume else None
        if self.options.loggers:
            self.log = EventLog(self.pipe, *self.options.loggers, folder=self.options.folder, first_step=start)
            # Of the step of the checkpoint: the log begins anew from there.
            for step, loss in self.history.validation[-1:]:
                if step == start:
                    self.log.validation(step, loss)
        return start

    def _resume(self) -> int:
        place = self.options.checkpoint
        if not self.pipe.ranks.any(kept.is_any(place)):
            self.screen.say("no checkpoint yet: starting at step 0")
            return 0
        extra = self.pipe.load(place, optimizer=self.rated.optimizer, data=self.job.position, or_older=True)
        self.history = History.from_json(extra)
        self.screen.say(f"resumed from step {extra['step']} ({place})")
        return int(extra["step"])

    # -- training

    def train(self) -> bool:
        options = self.options
        start = self._begin()
        stopped = False
        # A run that ended early and is resumed stays where it was.
        end = start if self._has_had_enough() else options.steps
        with self.screen.bar(options.steps, start) as bar:
            for step in range(start, end):
                began = time.perf_counter()
                loss = self._step(step)
                self.history.seconds.append(time.perf_counter() - began)
                self.history.losses.append(loss)
                if self.lines is not None:
                    self.lines.write(step=step, loss=loss, seconds=self.history.seconds[-1])
                self._count_from_loss(step)
                done = step + 1
                bar(done, f"loss {loss:.4f}  {self.history.speed(self.rows):,.0f} {self.unit}/s")
                if options.validate_every and self.job.validation and done % options.validate_every == 0:
                    self._validate(done)
                enough = self._has_had_enough()
                stopped = self.pipe.ranks.any(self.stop.is_set() or os.getppid() != self.parent)
                ends = stopped or enough or done == options.steps
                if ends or (options.checkpoint_every and done % options.checkpoint_every == 0):
                    profile = None if ends else self.recutter.profile(self.pipe)
                    self._save(done, wait=ends or profile is not None)
                    if profile is not None:
                        self._recut(done, profile)
                if ends:
                    break
        if self.log is not None:
            self.log.close()
        if stopped:
            again = f"penstock train --resume -o {options.output}"
            self.screen.say(f"stopped after step {len(self.history.losses)}; the run goes on with: {again}")
            return False
        self._finish()
        return True

    def _step(self, step: int) -> float:
        self.update.set_rate(self.rated, step)  # before the log looks at it
        log, optimizer = self.log, self.rated.optimizer
        recorded = self.pipe.record() if self.recutter.wants(step) else nullcontext()
        logged = nullcontext(Noted()) if log is None else log.step(step, optimizer=optimizer, tokens=self.rows)
        with recorded as recording, logged as noted:
            noted.loss, noted.norm = self.update.apply(self.pipe, self.rated, step)
        if recording is not None:
            self.recutter.take(self.pipe, recording)
        return noted.loss

    def _recut(self, step: int, profile: Profile) -> None:
        """Go on from the checkpoint just written, with stages that mind how slow each rank is."""
        times = ", ".join(f"{time:g}" for time in profile.metadata["rank_times"])
        self.screen.say(f"step {step}: the ranks take {times} times as long as usual; the model is cut anew")
        plan = self.pipe.plan
        del self.pipe, self.rated  # before there are others
        gc.collect()
        self._cut({"schedule": plan.name, "stages": plan.num_stages, "profile": profile})
        self.pipe.load(self.options.checkpoint, optimizer=self.rated.optimizer)
        if self.log is not None:
            self.log.pipe = self.pipe

    def _count_from_loss(self, step: int) -> None:
        """After the first good step since a rank was lost: how long that took."""
        if self.lost is not None:
            recovery = Recovery(step, time.time() - self.lost, self._ranks)
            self.history.recoveries.append(recovery)
            self.screen.say(str(recovery))
            self.lost = None

    def _validate(self, step: int) -> None:
        with self.update.casting():
            losses = [self.pipe.evaluate(*args, target=target).loss for args, target in self.job.validation]
        rows = [batch_size_of(args) or 1 for args, _ in self.job.validation]
        loss = sum((x or 0.0) * size for x, size in zip(losses, rows, strict=True)) / sum(rows)
        best = self.history.best
        self.history.validation.append((step, loss))
        self.screen.say(f"step {step}: validation loss {loss:.4f}")
        if self.log is not None:
            self.log.validation(step, loss)
        if self.options.keep_best and loss < best:
            extra = {"step": step, "validation": loss}
            self.pipe.save(self.options.folder / "best", optimizer=self.rated.optimizer, extra=extra)

    def _has_had_enough(self) -> bool:
        """Whether the validation loss has not become better for as long as --patience allows."""
        patience = self.options.patience
        enough = self.history.is_enough(patience)
        if enough:
            self.screen.say(
                f"no better validation loss in {patience} validations: the run ends; --resume --patience 0 goes on"
            )
        return enough

    def _save(self, step: int, *, wait: bool) -> None:
        """In the middle of a run the steps go on as soon as the tensors are copied."""
        began = time.perf_counter()
        extra = {"step": step, **asdict(self.history)}
        place, keep, data = self.options.checkpoint, self.options.keep, self.job.position
        self.pipe.save(place, optimizer=self.rated.optimizer, data=data, extra=extra, keep=keep, wait=wait)
        self.history.saving.append(time.perf_counter() - began)
        if wait and self.screen.enabled:
            kept.forget(place, DISK)

    # -- after

    def _finish(self) -> None:
        args, target = self.example
        if self.job.text is not None and self.options.sample:
            length = args[0].shape[1]
            sample = generate(self.pipe, self.job.text, self.options.sample, length=length, seed=self.options.seed)
            self.screen.say(f"sample:\n{sample}")
        with self.update.casting():
            figures = run_report.collect(self.pipe, self.history, self.example)
            if self.options.trace:  # some more steps for the profiler, whose gradients are dropped
                file = self.options.folder / "trace.json"
                with traced(self.pipe, file):
                    for _ in range(self.options.trace):
                        self.pipe.step(*args, target=target)
                self.pipe.zero_grad()
                self.screen.say(f"trace: {file} (open it in https://ui.perfetto.dev)")
        if not self.screen.enabled:
            return
        of_run = {"title": self.job.title, "rows": self.rows, "unit": self.unit}
        path = run_report.write(self.options.folder, of_run | figures)
        losses = self.history.losses
        self.screen.say(f"final loss {losses[-1]:.4f}" if losses else "nothing to do")
        self.screen.say(f"report: {path}")
