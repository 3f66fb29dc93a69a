"""Guard: checks the numbers of each training step and acts on NaN or Inf.

A step's loss and gradient norm are read back like the loss of the metrics: at once on the CPU,
before the update; some steps later on CUDA, where nothing waits for them. There the update is
skipped on the device itself, by the flag that torch's fused optimizers take (``found_inf``). Only a
bad step is run once more, to find the layer (``replay.py``).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.readback import Readback
from engine.core.shards import norms
from engine.core.snapshot import State
from engine.core.spool import Emit, now
from engine.core.tensor_names import leaves, root
from engine.core.timing import Clock, taken_out
from engine.data.batches.batch import Batch
from engine.data.batches.rows import Rows
from engine.data.sources.joined import name_of
from engine.guards.replay import Found, Pass, Replay, Skipped, described
from engine.guards.update_gate import UpdateGate
from engine.learner.learner import Learner
from engine.learner.side_effects import Randomness
from engine.losses.loss_sums import StepPart
from engine.network.layers import LayerFailed
from engine.network.network import Network
from engine.optim.gradient_scaling import MIN_SCALE
from glasshouse import jsonio
from glasshouse.errors import NonFinite, RunFailure, TooManySkipped
from glasshouse.events import STATS_COLUMNS
from glasshouse.spec import TrainJob
from glasshouse.spec.guards import MAX_SKIPPED

NUM_STEPS = 20
"""Number of steps whose values are kept and reported with the first bad one."""
MAX_FINDINGS = 20
"""Number of findings that a job reports; later ones are only counted."""
MAX_SAMPLES = 1000
"""Number of row numbers that a finding lists."""
SHARE = 0.005
"""Fraction of step time for checking gradients where steps may be skipped. Half of what is
promised, because the rest of the guard takes time too."""
_MAX_EVERY = 64
SCALE = "loss_scale"
"""Reported with the checked numbers if losses are scaled."""
_PHASES = ("update", "forward", "backward")
"""Where a NaN may first be, in the order of a step."""
_ABSMAX = STATS_COLUMNS.index("absmax")
_STEP_COLUMNS = ("step", "loss", "grad_norm", "lr")


@dataclass
class CheckedStep:
    """A checked step whose numbers have not been read back yet."""

    step: int
    epoch: int
    lr: float
    names: list[str]
    """What the numbers are: ``loss``, ``gradients``, ``outputs`` or ``parameters``."""
    passes: list[Pass]
    before: Sequence[Pass] = ()
    """The passes of the step whose update produced its parameters."""


class Guard:
    """Guards one training run; its state is part of checkpoints."""

    def __init__(
        self,
        job: TrainJob,
        learner: Learner,
        rows: Rows,
        *,
        readback: Readback,
        clock: Clock,
        emit: Emit,
    ) -> None:
        self._job = job
        self._rows = rows
        self._readback = readback
        self._home = learner.home
        self._devices = learner.network.devices(rows.device)
        self._clock = clock
        self._emit = emit
        self._optimizer = learner.optimizer
        spec = job.guards.nonfinite
        self._action, self._checks = spec.action, frozenset(spec.check)
        self._limit = spec.max_skipped or MAX_SKIPPED
        skipped = Skipped(spec.skip)
        self._learner = learner
        self._replay = Replay(learner, rows, skipped)
        named = learner.network.named_parameters()
        self._graded = [item for name, item in named if item.requires_grad and name not in skipped]
        self._norms: list[Tensor] = []
        """The norms of the outputs of the current pass."""
        self._scaling = learner.scaling
        self._gate = UpdateGate(
            learner.network,
            learner.optimizer,
            readback.device,
            self._action,
            takes_flag=None if learner.scaling is None else False,
        )
        self._group = learner.group
        # several processes check the same steps
        self._pace = CheckInterval(leaves_out=self._action == "warn" and self._group.is_alone)
        self._passes: list[Pass] = []
        self._previous: list[Pass] = []
        """The passes of the newest complete step."""
        self._advice: str | None = None
        """The first cause of the newest bad numbers, while they continue."""
        self._kept: deque[list[Any]] = deque(maxlen=NUM_STEPS)
        self._is_armed = True
        self._has_overflowed = False
        """Whether an overflowed norm was reported and no step was good since then."""
        self._num_findings = self._in_a_row = self.num_skipped = 0
        self._newest = (0, 0, 0.0)
        if "outputs" in self._checks:
            self._watch_outputs(learner.network, skipped)
        if "parameters" in self._checks:
            learner.optimizer.register_step_post_hook(self._after_update)

    # --- in the loop ------------------------------------------------------------------------

    def begin(
        self,
        batch: Batch,
        part: StepPart | None = None,
        seed_stage: Callable[[int], object] | None = None,
    ) -> None:
        """Start the forward pass of a batch.

        ``part``: its place in the step, if several micro-batches make one step. ``seed_stage``: of
        a pipeline, what seeds the random generators for a stage.
        """
        if self._checks:
            if not self._passes:
                self._gate.begin()
            randomness = Randomness.now(*self._devices)
            carried = self._learner.hidden_state
            hidden_state = None if carried is None else carried.snapshot()
            self._passes.append(
                Pass(batch.taken, randomness, batch.trained_in, hidden_state, part, seed_stage)
            )

    def blame(self, error: Exception, batch: Batch | None) -> Exception:
        """Return a ``NonFinite`` failure if a layer or the loss failed on NaN or Inf.

        The forward pass is run once more on the same batch, with the random state of the step,
        which only a guard that checks something keeps. Any other error is returned unchanged.
        """
        if batch is None or not isinstance(error, LayerFailed):
            return error
        if isinstance(error.cause, RunFailure):
            return error
        try:
            if self._passes:
                self._passes[-1].restore(self._learner)
            found = self._replay.in_forward(batch)
        except Exception:  # it only adds to what is known
            return error
        what = {
            "input": f"In the data, {found.tensor!r} is",
            "param": f"The parameter {found.tensor!r} was",
            "output": f"In the forward pass the output of {found.layer!r} was",
        }
        if found.kind is None:
            return error
        first_line = (str(error.cause).strip() or type(error.cause).__name__).splitlines()[0]
        detail = f"{what[found.kind]} not finite, and {error.layer!r} failed by it: {first_line}"
        own = [NonFinite.OF_DATA] * (found.kind == "input") + _large_fields(found)
        return NonFinite(detail, layer=found.layer, hint=self._advice or next(iter(own), None))

    def check(self, step: int, epoch: int, loss: Tensor) -> None:
        """Check a step between its backward pass and clipping; its update may be skipped.

        Raises:
            NonFinite: a number of this or an earlier step was NaN or Inf and the job is to fail, or
                too many steps in a row were skipped.
        """
        if not self._checks:
            return
        passes, self._passes = self._passes, []
        before, self._previous = self._previous, passes
        self._newest = step, epoch, float(self._optimizer.param_groups[0]["lr"])
        numbers: dict[str, Tensor] = {"loss": loss.detach()} if "loss" in self._checks else {}
        if "gradients" in self._checks and self._pace.is_due():
            with self._pace:
                graded = [item.grad for item in self._graded]
                own = norm_of(graded, loss, home=self._home)
                numbers["gradients"] = self._group.norm_over_stages(own)
        if "outputs" in self._checks:
            numbers["outputs"] = self._group.sum(
                norm_of(self._norms, loss, math.inf, home=self._home)
            )
            self._norms = []
        if self._scaling is not None and "gradients" in self._checks:
            numbers[SCALE] = self._scaling.scale
        # overflows are skipped anyway where losses are scaled
        idle = () if self._scaling is None else ("gradients", SCALE)
        if decisive := [item for name, item in numbers.items() if name not in idle]:
            self._gate.take(decisive)
        self._put(CheckedStep(*self._newest, [*numbers], passes, before), numbers)

    def has_skipped(self) -> bool:
        """Return whether the newest step made no update; waits for the device if that decided."""
        has_overflowed = self._scaling is not None and self._scaling.has_skipped
        return has_overflowed or self._gate.has_skipped

    def state(self) -> State:
        """Return the counts and the values of the last steps."""
        return {
            "skipped": self.num_skipped,
            "in_a_row": self._in_a_row,
            "findings": self._num_findings,
            "armed": self._is_armed,
            "overflowed": self._has_overflowed,
            "kept": [*self._kept],
        }

    def restore(self, state: State) -> None:
        """Restore the state."""
        self.num_skipped = int(state["skipped"])
        self._in_a_row = int(state["in_a_row"])
        self._num_findings = int(state["findings"])
        self._is_armed = bool(state["armed"])
        self._has_overflowed = bool(state.get("overflowed", False))  # older versions lack it
        self._kept.clear()
        self._kept.extend([jsonio.number(item) for item in row] for row in state["kept"])

    # --- checking ---------------------------------------------------------------------------

    def _watch_outputs(self, network: Network, skipped: Skipped) -> None:
        seen = {module: name for name, module in network.layers.items() if name not in skipped}
        for module, name in seen.items():  # a module that layers share is hooked once
            module.register_forward_hook(self._on_output(name, skipped))

    def _on_output(self, name: str, skipped: Skipped) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._passes:  # an evaluation between two steps, or a replay
                return
            found = [item.detach() for leaf, item in leaves(name, output) if leaf not in skipped]
            floating = [item for item in found if item.is_floating_point()]
            if floating:
                self._norms.append(norm_of(floating, floating[0], math.inf))

        return hook

    def _after_update(self, _optimizer: object, _args: object, _keywords: object) -> None:
        parameters = [item.detach() for item in self._graded]
        numbers: dict[str, Tensor] = {}
        if parameters or self._group.is_staged:
            like = parameters[0] if parameters else torch.zeros((), device=self._devices[0])
            own = norm_of(parameters, like, math.inf, home=self._home)
            numbers["parameters"] = self._group.over_stages(own)
        self._put(CheckedStep(*self._newest, [*numbers], [], self._previous), numbers)

    def _put(self, seen: CheckedStep, numbers: Mapping[str, Tensor]) -> None:
        if numbers:
            self._readback.put([*numbers.values()], lambda arrived: self._arrived(seen, arrived))

    # --- findings ---------------------------------------------------------------------------

    def _arrived(self, seen: CheckedStep, arrived: Sequence[float]) -> None:
        values = dict(zip(seen.names, arrived, strict=True))
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        has_ended = values.pop(SCALE, MIN_SCALE) < MIN_SCALE
        if self._scaling is not None and not has_ended:
            bad = [name for name in bad if name != "gradients"]
        bad += [SCALE] * has_ended
        if "parameters" not in values:
            figures = values.get("loss"), values.get("gradients"), seen.lr
            self._kept.append([seen.step, *figures])
        if not bad:
            if "parameters" not in values or len(self._checks) == 1:
                self._is_armed, self._in_a_row = True, 0
                self._has_overflowed, self._advice = False, None
            return
        if self._action == "skip_step":
            self._gate.shut()
            self.num_skipped += 1
            self._in_a_row += 1
            self._metrics(seen, {"skipped_steps": self.num_skipped})
        # its values may be finite, and only its norm overflows, as was reported
        overflows = bad == ["gradients"] and math.isinf(values["gradients"])
        is_first = self._is_armed and not (self._has_overflowed and overflows)
        is_over = has_ended or self._action == "fail" or self._in_a_row > self._limit
        if (is_first and self._num_findings < MAX_FINDINGS) or is_over:
            self._num_findings += 1
            self._report(seen, bad, values, is_over=is_over)

    def _report(
        self, seen: CheckedStep, bad: Sequence[str], values: Mapping[str, float], *, is_over: bool
    ) -> None:
        """Find the layer, emit a finding, and fail the job if required.

        Raises:
            NonFinite: the job fails.
        """
        with taken_out(self._clock, "probes"):
            found = self._found(seen)
        is_of_before = found.phase == "update" and "parameters" not in bad
        step = seen.step - 1 if is_of_before else seen.step
        text = self._described(seen, found, bad)
        passes = seen.passes if seen.passes and not is_of_before else seen.before
        record = self._finding(passes, found, bad, text, is_over=is_over)
        record["step"] = max(step, 0)
        is_finite = found.norm is not None
        if not self._group.is_alone and self._readback.device.type == "cpu":
            own = {"record": record, "is_finite": is_finite}
            order = self._learner.network.names if self._group.is_staged else ()
            found_by_all = joined(self._group.gather(own), self._group.num_peers, order)
            chosen = self._group.broadcast(found_by_all)
            record, is_finite = chosen["record"], chosen["is_finite"]
            found.layer, text = record["layer"], record["message"]
        # An overflowing norm may be the last warning before a first NaN, which is reported too.
        self._is_armed = self._has_overflowed = is_finite
        self._advice = record["causes"][0]
        self._emit(record)
        if not is_over:
            return
        if self._readback.device.type == "cpu" and "loss" in values:
            # of a step that never ends
            self._metrics(seen, {"loss": values["loss"], "lr": seen.lr})
        is_skipping = self._action == "skip_step" and SCALE not in bad
        kind = TooManySkipped if is_skipping else NonFinite
        if kind is TooManySkipped:
            text = f"{self._in_a_row} steps in a row were skipped, and {self._limit} may be. {text}"
        keys = ("step", "layer", "kind", "phase", "samples", "num_samples", "bad_samples")
        raise kind(
            text,
            layer=found.layer,
            step=seen.step,
            found={key: record[key] for key in keys} | {"metric": bad[0]},
            hint=self._advice,
        )

    def _metrics(self, seen: CheckedStep, values: dict[str, float]) -> None:
        record = {"type": "metrics", "at": now(), "step": seen.step, "epoch": seen.epoch}
        self._emit(record | {"values": values})

    def _found(self, seen: CheckedStep) -> Found:
        if "parameters" in seen.names:
            return self._replay.in_parameters()
        try:
            return self._replay.find(seen.passes)
        except Exception:  # the layer is only additional information
            return Found()

    def _described(self, seen: CheckedStep, found: Found, bad: Sequence[str]) -> str:
        what = {"gradients": "the norm of the gradients", "loss": "the loss"}
        hit = " and ".join(what.get(name, name) for name in bad)
        is_one = len(bad) == 1 and bad[0] in what
        said = f"{hit} {'is' if is_one else 'are'} not finite."
        if SCALE in bad:
            said = f"the loss scale has fallen below {MIN_SCALE}: gradients overflow float16 "
            said += "however little they are scaled. Take precision bfloat16, or a smaller loss."
        layers = self._job.network.layers
        readers = [x.name for x in layers if found.layer in [*map(root, x.inputs or ())]]
        text = f"Step {seen.step}: {said} {described(found, readers)}"
        if found.phase == "update" and "parameters" not in bad:
            text += " The update of an earlier step has made it so."
            text += " With action fail that step would be looked into." * (self._action == "warn")
        elif not self._gate.keeps:
            text += " That is with the parameters of some steps later."
        return text

    def _finding(
        self, passes: Sequence[Pass], found: Found, bad: Sequence[str], text: str, *, is_over: bool
    ) -> dict[str, Any]:
        """Return the finding's record; ``passes``: those of the bad step."""
        one = passes[found.num_pass] if passes else None
        numbers = None if one is None else self._rows.numbers(one.taken)
        samples: list[int] = [] if numbers is None else numbers[:MAX_SAMPLES].tolist()
        bad_samples: list[int] = []
        if numbers is not None and found.bad_rows is not None:
            bad_samples = numbers[found.bad_rows.to(numbers.device)][:MAX_SAMPLES].tolist()
        done = {"warn": "none", "skip_step": "skipped", "fail": "failed"}[self._action]
        return {
            "type": "finding",
            "at": now(),
            "rule": "nonfinite",
            "severity": "error" if is_over else "warning",
            "layer": found.layer,
            "tensor": found.tensor,
            "kind": found.kind,
            "phase": found.phase,
            "message": text,
            "action": "failed" if is_over else done,
            "checks": [*bad],
            "split": name_of(self._job.data.sources),
            "samples": samples,
            "num_samples": 0 if numbers is None else len(numbers),
            "bad_samples": bad_samples,
            "causes": causes(found, [*self._kept], of_scale=SCALE in bad),
            "steps": {"columns": [*_STEP_COLUMNS], "rows": [*self._kept]},
            "tensors": {"columns": [*STATS_COLUMNS], "rows": found.rows},
        }


def joined(
    found: Sequence[dict[str, Any]], num_peers: int = 1, order: Sequence[str] = ()
) -> dict[str, Any]:
    """Return one finding of those of all processes, which have seen different rows of a step.

    It is that of the first process that has found a NaN or Inf, with the rows of all. Each of
    ``found`` has the ``record``, and whether all values were finite (``is_finite``).
    ``num_peers``: how many processes, one after another, have seen the same rows. ``order``: of a
    pipeline, the layers in order: the first process is then the one that computed first.
    """
    places = {name: place for place, name in enumerate(order)}

    def rank(one: dict[str, Any]) -> tuple[Any, ...]:
        record = one["record"]
        layer, phase = record["layer"], record["phase"]
        of_values = layer is None, one["is_finite"]
        if not order or layer is None:
            return of_values
        place = places.get(root(layer), len(order) if layer == "loss" else -1)
        return *of_values, _PHASES.index(phase), -place if phase == "backward" else place

    ranked = sorted(found, key=rank)
    if not ranked:  # not process 0, which joins them
        return {}
    record, all_records = dict(ranked[0]["record"]), [one["record"] for one in found]
    of_rows = all_records[::num_peers]
    samples = [number for one in of_rows for number in one["samples"]]
    bad = dict.fromkeys(number for one in all_records for number in one["bad_samples"])
    record["samples"], record["bad_samples"] = samples[:MAX_SAMPLES], [*bad][:MAX_SAMPLES]
    record["num_samples"] = sum(one["num_samples"] for one in of_rows)
    return {"record": record, "is_finite": ranked[0]["is_finite"]}


class CheckInterval:
    """Decides how often gradients are checked, to keep within the allowed fraction of step time.

    The times are those of the host.
    """

    def __init__(self, *, leaves_out: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._leaves_out = leaves_out
        self._clock = clock
        self.every = 1
        """Gradients are checked in one of this many steps."""
        self._left = 0
        self._costs: deque[float] = deque(maxlen=4)
        self._steps: deque[float] = deque(maxlen=32)
        self._last = self._began = self._clock()

    def is_due(self) -> bool:
        """Return whether this step is checked; call it once a step."""
        if not self._leaves_out:
            return True
        here = self._clock()
        self._steps.append(here - self._last)
        self._last = here
        self._left -= 1
        return self._left < 0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        if not self._leaves_out:
            return
        self._costs.append(self._clock() - self._began)
        if len(self._costs) == self._costs.maxlen:
            step_s, cost_s = (
                sorted(times)[len(times) // 2] for times in (self._steps, self._costs)
            )
            self.every = min(max(1, math.ceil(cost_s / (SHARE * max(step_s, 1e-9)))), _MAX_EVERY)
        self._left = self.every - 1


def norm_of(
    tensors: Sequence[Tensor | None],
    like: Tensor,
    order: float = 2,
    *,
    home: torch.device | None = None,
) -> Tensor:
    """Return the norm of all values together: NaN or Inf if a value is. Does not wait for a device.

    ``home``: the device of the result, if the tensors are on several. Collective if a tensor is
    sharded. With order 2 it is also Inf if values exceed 1e19, because
    their squares overflow.
    """
    there = [item.detach() for item in tensors if item is not None]
    dense = [item if item.layout is torch.strided else item._values() for item in there]  # pyright: ignore[reportPrivateUsage]
    filled = [item for item in dense if item.numel()]
    if not filled:
        return torch.zeros((), device=home or like.device)
    return torch.linalg.vector_norm(norms(filled, order, home).to(torch.float32), order)


def causes(found: Found, steps: Sequence[Sequence[Any]], *, of_scale: bool = False) -> list[str]:
    """Return possible causes and what to do, the most likely first; at least one."""
    named: list[str] = [NonFinite.OF_SCALE] if of_scale else []
    if found.kind == "input":
        named.append(NonFinite.OF_DATA)
    named += _large_fields(found)
    norms = [row[2] for row in steps[:-1] if row[2] is not None and math.isfinite(row[2])]
    if len(norms) >= 2 and norms[-1] > 10 * sorted(norms)[len(norms) // 2]:
        named.append(NonFinite.OF_GROWTH)
    if found.kind in ("output", "output_grad") and found.norm is None and not named:
        named.append(NonFinite.OF_FUNCTION)
    return named or [NonFinite.OF_RATE]


def _large_fields(found: Found) -> list[str]:
    """Return a cause for each field of the data that has large values."""
    values = [(row[0], row[_ABSMAX]) for row in found.fields]
    return [NonFinite.of_field(n, x) for n, x in values if NonFinite.LARGE <= x < math.inf]
