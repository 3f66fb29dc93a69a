"""What is compared: one value for each row, of each input field and of some layers.

The values of a series are independent from row to row, because those of a single row may depend on
each other: all pixels of an image, all steps of a sequence. Only then is it known how far the
histograms of two samples of one distribution differ.

Shape suffixes: B = rows, T = steps of the longest row, D = numbers of a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.tensor_names import root
from engine.data.batches.rows import Loaded
from engine.data.columns.loaded import LoadedField, LoadedSequence
from engine.data.columns.normalization import along
from engine.data.columns.vocabulary import UNKNOWN
from engine.network.network import Network, needed_layers
from engine.serving.model_inputs import ModelInputs, OutputShape
from glasshouse.spec import DenseField, DenseSequenceField, IntegerField, IntegerSequenceField

Floats = NDArray[np.float64]

MAX_COLUMNS = 32
"""The most numbers of a row that are compared one by one; of more, mean and std."""
MAX_CHANNELS = 16
MAX_INNER_LAYERS = 8
NO_STEP = -1
"""The category of a random step of a row without steps."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Series:
    """A series of values, one for each row."""

    of: Literal["field", "layer"]
    name: str
    measure: str
    """``value``, ``mean``, ``category``, the name of a column …"""


Values = dict[Series, Floats]


def is_category(series: Series) -> bool:
    """Return whether the values are categories and not numbers."""
    return series.measure in {"category", "class", "step"}


# --- fields ----------------------------------------------------------------------------------


class FieldSeries:
    """The series of the fields that a network reads."""

    def __init__(self, inputs: ModelInputs, seed: int | None = None) -> None:
        """``seed``: of the steps of sequences that are drawn."""
        self._inputs = inputs
        self._generator = np.random.default_rng(seed)

    def values(self, rows: Mapping[str, Loaded]) -> Values:
        """Return the values of the fields that are there, in host memory and before padding.

        Numbers are in the units of their column, before they are scaled and normalized.
        """
        found: Values = {}
        for name, loaded in rows.items():
            if isinstance(loaded, LoadedSequence):
                measured = self._sequence(name, loaded)
            elif loaded.is_integer:
                measured = {"category": _floats(loaded.values)}
            else:
                measured = self._dense(name, loaded)
            found |= {Series("field", name, key): item for key, item in measured.items()}
        return found

    def _dense(self, name: str, loaded: LoadedField) -> dict[str, Floats]:
        x = self._in_units(name, loaded.batch(slice(0, len(loaded.values)), _CPU))
        shape, field = x.shape[1:], self._inputs.fields[name]
        if len(shape) == 3 and shape[0] <= MAX_CHANNELS:
            channels = [""] if shape[0] == 1 else [f" of channel {n}" for n in range(shape[0])]
            return {
                f"{key}{channel}": item
                for number, channel in enumerate(channels)
                for key, item in _moments(x[:, number]).items()
            }
        size = math.prod(shape)
        if size > MAX_COLUMNS:
            return _moments(x)
        if size == 1:
            return {"value": _floats(x.flatten())}
        columns = field.columns if isinstance(field, DenseField) else None
        named = columns is not None and len(columns) == size
        names = columns if columns is not None and named else [f"[{n}]" for n in range(size)]
        return dict(zip(names, _floats(x.flatten(1)).T, strict=True))

    def _sequence(self, name: str, loaded: LoadedSequence) -> dict[str, Floats]:
        lengths_B = loaded.lengths.numpy()
        found = {"length": lengths_B.astype(np.float64)}
        field = self._inputs.fields[name]
        if isinstance(field, IntegerSequenceField) and field.tokens is not None:
            found["unknown tokens"] = _share_of(UNKNOWN, loaded)
        drawn_B = self._generator.random(len(lengths_B))
        place_B = np.minimum((drawn_B * lengths_B).astype(np.int64), np.maximum(lengths_B - 1, 0))
        one = replace(
            loaded,
            starts=loaded.starts + torch.from_numpy(place_B),
            lengths=loaded.lengths.clamp(max=1),
        )
        x, _ = one.batch(slice(0, len(lengths_B)), _CPU)
        has_steps_B = lengths_B > 0
        if self._inputs.shapes[name].dim is None:
            step = self._in_units(name, x[:, 0])
            size = math.prod(step.shape[1:])
            numbers = (
                _moments(step)
                if size > MAX_COLUMNS
                else dict(
                    zip([f"[{n}]" for n in range(size)], _floats(step.flatten(1)).T, strict=True)
                )
            )
            numbers = {f"{key} of a step": item for key, item in numbers.items()}
            return found | {key: np.where(has_steps_B, v, np.nan) for key, v in numbers.items()}
        found["step"] = np.where(has_steps_B, _floats(x[:, 0]), float(NO_STEP))
        if one.weights is not None:
            weights = replace(one, values=one.weights, weights=None, is_integer=False)
            value = _floats(weights.batch(slice(0, len(lengths_B)), _CPU)[0].flatten(1)[:, 0])
            found["value of a step"] = np.where(has_steps_B, value, np.nan)
        return found

    def _in_units(self, name: str, x: Tensor) -> Tensor:
        """Return numbers [B, …] as they were before they were normalized and scaled."""
        preparing, field = self._inputs.meaning.preparing, self._inputs.fields[name]
        figures = None if preparing.known is None else preparing.known.figures.get(name)
        y = x.to(torch.float64)
        if figures is not None and figures.shift is not None and figures.divisor is not None:
            divisor = torch.from_numpy(along(figures.divisor, x.dim()))
            y = y * divisor + torch.from_numpy(along(figures.shift, x.dim()))
        scale = field.scale if isinstance(field, DenseField | DenseSequenceField) else None
        return y if not scale else y / scale


def category_name(inputs: ModelInputs, series: Series, number: int) -> str:
    """Return what a category is called."""
    if series.measure == "step":
        if number == NO_STEP:
            return "no step"
        known = inputs.meaning.preparing.known
        tokens = None if known is None else known.tokens.get(series.name)
        listed = [] if tokens is None else ["(padding)", "(unknown)", *tokens.listed]
    elif series.of == "layer":
        known_classes = inputs.classes.get(series.name)
        listed = [] if known_classes is None else list(known_classes.named or ())
    else:
        field = inputs.fields[series.name]
        listed = list((field.classes or ()) if isinstance(field, IntegerField) else ())
    return str(listed[number]) if 0 <= number < len(listed) else str(number)


def _share_of(token: int, loaded: LoadedSequence) -> Floats:
    """Return the share of the steps of each row that are a token; NaN without steps."""
    is_token = (loaded.values == token).to(torch.int64).numpy()
    sums = np.concatenate([[0], np.cumsum(is_token)])
    starts_B, lengths_B = loaded.starts.numpy(), loaded.lengths.numpy()
    num_B = sums[starts_B + lengths_B] - sums[starts_B]
    return np.where(lengths_B > 0, num_B / np.maximum(lengths_B, 1), np.nan)


# --- layers ----------------------------------------------------------------------------------


def watched_layers(
    inputs: ModelInputs, network: Network, globs: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the outputs to watch, in the order of the network.

    ``globs``: of layers. None: the network's outputs, and some layers with parameters, evenly
    spaced.
    """
    usable = [name for name, output in inputs.outputs.items() if _has_series(output)]
    first: dict[str, str] = {}
    for name in usable:
        first.setdefault(root(name), name)
    if globs is not None:
        matched = {
            name
            for name in usable
            if any(
                fnmatchcase(name, glob)
                or (first[root(name)] == name and fnmatchcase(root(name), glob))
                for glob in globs
            )
        }
        return tuple(name for name in usable if name in matched)
    results = {first.get(root(name), "") if name not in usable else name for name in
               inputs.default_outputs}  # fmt: skip
    needed = {
        layer.name for layer in needed_layers(inputs.trained_by.network, inputs.default_outputs)
    }
    inner = [
        name
        for layer, name in first.items()
        if name not in results
        and layer in needed
        and any(True for _ in network.layers[layer].parameters())
    ]
    count = min(len(inner), MAX_INNER_LAYERS)
    chosen = {inner[place * len(inner) // count] for place in range(count)}
    return tuple(name for name in usable if name in results or name in chosen)


def _has_series(output: OutputShape) -> bool:
    return output.has_rows and output.dtype.is_floating_point and -1 not in output.item


def layer_values(name: str, x: Tensor, lengths_B: Tensor | None, *, is_scores: bool) -> Values:
    """Return the values of a layer's output.

    Args:
        name: the output.
        x: [B, …], or [B, T, …] if it has a value for each step.
        lengths_B: the number of steps of each row.
        is_scores: whether it has scores of classes.
    """
    return {
        Series("layer", name, key): _floats(item)
        for key, item in measures_of(x, lengths_B, is_scores=is_scores).items()
    }


def measures_of(
    x: Tensor, lengths_B: Tensor | None, *, is_scores: bool = False
) -> dict[str, Tensor]:
    """Return mean and root mean square of each row, [B], on the device of a layer's output.

    Of a single number, its value; of scores, also the class with the highest one.
    """
    y_BD = x.detach().to(torch.float32)
    if lengths_B is None:
        y_BD = y_BD.flatten(1) if y_BD.dim() > 1 else y_BD[:, None]
        if y_BD.shape[1] == 1:
            return {"value": y_BD[:, 0]}
        size = float(y_BD.shape[1])
        found = {"mean": y_BD.mean(1), "rms": torch.linalg.vector_norm(y_BD, dim=1) / size**0.5}
        if is_scores and x.dim() == 2:
            found["class"] = x.argmax(1)
        return found
    lengths_B = lengths_B.to(x.device)
    is_step_BT = torch.arange(x.shape[1], device=x.device) < lengths_B[:, None]
    y_BTD = y_BD.reshape(*x.shape[:2], -1)
    y_BTD = torch.where(is_step_BT[..., None], y_BTD, 0.0)
    size_B = lengths_B.clamp(min=1) * y_BTD.shape[2]
    sums_B, squares_B = y_BTD.sum((1, 2)), y_BTD.square().sum((1, 2))
    return {"mean": sums_B / size_B, "rms": (squares_B / size_B).sqrt()}


def _moments(x: Tensor) -> dict[str, Floats]:
    """Return mean and standard deviation of each row."""
    std, mean = torch.std_mean(x.flatten(1), dim=1, correction=0)
    return {"mean": _floats(mean), "std": _floats(std)}


def _floats(x: Tensor) -> Floats:
    return x.detach().to(torch.float64).cpu().numpy()
