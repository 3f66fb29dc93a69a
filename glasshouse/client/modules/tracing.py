"""Converts an ``nn.Module`` to an equivalent graph of layers with its weights.

torch.fx traces the module's code once with proxies for tensors. Its nodes become layers. Two
samples with different numbers of rows and steps show which sizes depend on the batch. The graph is
then built in plain torch and must have the same outputs and gradients as the module.
"""

import inspect
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from glasshouse.client.modules.conversion import Converter
from glasshouse.client.modules.graph_builder import Document, Drawing
from glasshouse.client.modules.layers import check_module, is_layer
from glasshouse.client.modules.size_errors import misfit
from glasshouse.client.modules.source_lines import (
    Stopped,
    place_in_text,
    place_in_traceback,
    refusal,
)
from glasshouse.client.modules.values import Ref
from glasshouse.client.modules.verification import compare
from glasshouse.errors import CannotTrace

Samples = Sequence[Mapping[str, Tensor]]
"""At least two batches of different sizes, by data field."""
_TRACE_LOCK = threading.Lock()
"""Only one trace at a time: torch.fx patches torch.nn.Module while it traces."""
_STOPS = {
    "symbolically traced variables cannot be used as inputs to control flow": (
        "an if or a loop depends on tensor values, which is not supported in a graph; use "
        "torch.where, or branch on an attribute of the module"
    ),
    "object cannot be interpreted as an integer": (
        "a Python loop or function uses a size of the batch; use torch functions over the whole "
        "axis"
    ),
    "Proxy object cannot be iterated": (
        "a loop iterates over a tensor or a size of the batch; use torch functions over the axis"
    ),
    "'len' is not supported": "len() of a tensor; use x.shape[0]",
}


@dataclass(frozen=True)
class Traced:
    """A traced module: its graph and weights."""

    graph: Document
    """``{"type": "graph", "layers", "outputs"}``; a layer's ``path`` is its name in the module."""
    weights: dict[str, Tensor]
    """The weights, by name in the graph: ``conv1.weight``."""


def trace(module: nn.Module, samples: Samples, inputs: Mapping[str, str]) -> Traced:
    """Trace a module to a graph and check that both compute the same.

    Args:
        module: the module. Its code is run; its weights, mode and buffers are left unchanged.
        samples: batches by data field, with different numbers of rows, and of steps for sequences.
        inputs: the data field of each argument of ``forward`` that receives a tensor.

    Raises:
        CannotTrace: a graph cannot express the module. The message names the line.
    """
    for path, item in module.named_modules():
        _check(item, path)
    with _TRACE_LOCK, _preserved(module):
        nodes = _run_fx(module, inputs)
        traced = _draw(module, nodes, samples, inputs)
        try:
            compare(module, traced.graph, traced.weights, samples, inputs)
        except RuntimeError as error:  # from torch, possibly in the module itself
            reason = f"the module cannot be run and trained: {_first_line(error)}"
            raise refusal(reason, place_in_traceback(error.__traceback__)) from error
    return traced


def _check(module: nn.Module, path: str) -> None:
    try:
        check_module(module, path)
    except Stopped as stopped:
        raise CannotTrace(str(stopped)) from None


@contextmanager
def _preserved(module: nn.Module) -> Generator[None]:
    """Restore modes, buffers and random generators on exit."""
    modes = {item: item.training for item in module.modules()}
    buffers = [(item, item.detach().clone()) for item in module.buffers()]
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for item, mode in modes.items():
                item.training = mode
            with torch.no_grad():
                for item, before in buffers:
                    item.copy_(before)


_FACTORIES = (torch.ones, torch.zeros, torch.full, torch.eye, torch.linspace, torch.tensor)
"""They take sizes as separate arguments, which torch.fx does not trace by itself."""


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        wrapped: Any = (pack_padded_sequence, pad_packed_sequence, *_FACTORIES)
        super().__init__(autowrap_functions=wrapped)
        self._autowrap_search += [torch, torch.nn.utils.rnn]
        self.record_stack_traces = True
        self.proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return is_layer(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(m, (nn.TransformerEncoder, nn.TransformerDecoder)):
            return _run_stack(m, *args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def _run_stack(stack: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the layers of a transformer in order; the rest of its ``forward`` is a fast path."""
    names = list(inspect.signature(stack.forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: item for name, item in given.items() if item is not None and item is not False}
    renamed = {"mask": "src_mask"} if isinstance(stack, nn.TransformerEncoder) else {}
    for layer in stack.layers:
        x = layer(x, **{renamed.get(name, name): item for name, item in given.items()})
    return x if stack.norm is None else stack.norm(x)


def _run_fx(module: nn.Module, inputs: Mapping[str, str]) -> list[fx.Node]:
    """Trace the module in training mode, so that dropout is recorded; return the nodes in order."""
    module.train()
    known = inspect.signature(module.forward).parameters
    others = {
        name: item.default
        for name, item in known.items()
        if name not in inputs and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    }
    try:
        graph = _Tracer().trace(module, concrete_args=others or None)
    except Exception as error:
        raise refusal(_reason(error), place_in_traceback(error.__traceback__)) from error
    return list(graph.nodes)


def _reason(error: Exception) -> str:
    text = str(error)
    reason = next((meaning for part, meaning in _STOPS.items() if part in text), None)
    if reason is not None:
        return reason
    return f"the code cannot be traced: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _draw(
    module: nn.Module, nodes: Sequence[fx.Node], samples: Samples, inputs: Mapping[str, str]
) -> Traced:
    module.eval()
    fields = {name: tuple(sample[name] for sample in samples) for name in samples[0]}
    converter = Converter(Drawing(module, fields), inputs, len(samples))
    output: Any = None
    for node in nodes:
        if _is_unused(node):
            continue
        try:
            with torch.no_grad():
                converter.convert(node)
        except CannotTrace:
            raise
        except Stopped as stopped:
            raise refusal(_said(node, str(stopped)), place_in_text(node.stack_trace)) from None
        except Exception as error:
            said = misfit(module, node, converter) or _said(node, _reason(error))
            raise refusal(said, place_in_text(node.stack_trace)) from error
        output = converter.known[node]
    return _finished(converter, output)


def _is_unused(node: fx.Node) -> bool:
    """Whether no other node reads this one, as for arguments that keep their defaults."""
    if node.op == "output":
        return False
    readers = [reader for reader in node.users if not _is_unused(reader)]
    return not readers and node.op != "placeholder"


def _said(node: fx.Node, reason: str) -> str:
    return f"{node.target!r}: {reason}" if node.op == "call_module" else reason


def _finished(converter: Converter, output: Any) -> Traced:
    """The complete graph, with the module's return values as outputs.

    Raises:
        CannotTrace: a return value is not a tensor, or not the output of a layer.
    """
    drawing = converter.drawing
    values = list(output.values()) if isinstance(output, dict) else output
    given = list(values) if isinstance(values, (tuple, list)) else [values]
    if not given or not all(isinstance(item, Ref) for item in given):
        raise CannotTrace("forward() must return a tensor, or a tuple or dict of tensors")
    fields = drawing.fields.keys()
    ends = [
        drawing.layer_of("Identity", "output", [item]) if item.name in fields else item
        for item in given
    ]
    graph = {"type": "graph", "layers": drawing.layers, "outputs": [item.name for item in ends]}
    return Traced(graph, drawing.weights)
