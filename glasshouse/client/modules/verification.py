"""Comparison of a graph with its module: outputs in training and evaluation mode, and gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.client.modules.plain_torch import Rebuilt
from glasshouse.client.modules.weight_names import names_in_module
from glasshouse.errors import CannotTrace

_SEED = 20_261_122
_RTOL, _ATOL = 1e-5, 1e-6


def compare(
    module: nn.Module,
    graph: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    samples: Sequence[Mapping[str, Tensor]],
    inputs: Mapping[str, str],
) -> None:
    """Run the module and the graph on the samples and compare them.

    Raises:
        CannotTrace: they differ, so the module does something that the trace does not show.
    """
    rebuilt = Rebuilt(graph)
    rebuilt.load_state_dict(dict(weights))
    rebuilt.to(next(iter(samples[0].values())).device)
    for mode in (False, True):  # training last: it updates running statistics
        for sample in samples:
            module.train(mode)
            rebuilt.train(mode)
            mine = _run(lambda batch=sample: tensors_of(_called(module, batch, inputs)))
            theirs = _run(lambda batch=sample: list(rebuilt(batch)))
            _check_outputs(mine, theirs, mode=mode)
            if not mode:
                _check_gradients(module, rebuilt, mine, theirs)


def _called(module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, str]) -> Any:
    return module(**{name: batch[field].clone() for name, field in inputs.items()})


def _run(work: Any) -> list[Tensor]:
    torch.manual_seed(_SEED)
    return work()


def tensors_of(output: Any) -> list[Tensor]:
    """The output of a module as a list of tensors."""
    values: Any = output.values() if isinstance(output, dict) else output  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return [values] if isinstance(values, Tensor) else list(values)


def _check_outputs(mine: list[Tensor], theirs: list[Tensor], *, mode: bool) -> None:
    when = "in training" if mode else "in evaluation"
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.shape != other.shape or not _is_close(one, other):
            raise CannotTrace(
                f"{when}, output {number} of the graph differs from that of the module: forward() "
                "does something that the trace does not show, such as a branch on self.training "
                "or on an attribute that changes, numpy, or random numbers"
            )


def _check_gradients(
    module: nn.Module, rebuilt: Rebuilt, mine: list[Tensor], theirs: list[Tensor]
) -> None:
    every = module.named_parameters(remove_duplicate=False)
    own = {name: item for name, item in every if item.requires_grad}
    learned = {n: item for n, item in rebuilt.named_parameters() if item.requires_grad}
    found = _gradients(theirs, learned)
    expected = _gradients(mine, own)
    names = names_in_module(rebuilt.graph, found)
    for name, gradient in found.items():
        other = next((expected[item] for item in names[name] if item in expected), None)
        if (gradient is None) != (other is None) or (
            gradient is not None and other is not None and not _is_close(gradient, other)
        ):
            raise CannotTrace(
                f"the gradient of {(names[name] or [name])[0]!r} differs from that of the module: "
                "forward() does something that the trace does not show, such as no_grad()"
            )


def _gradients(
    outputs: list[Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor | None]:
    """The gradients of a randomly weighted sum of the outputs."""
    ends = [item for item in outputs if item.requires_grad]
    if not ends or not parameters:
        return dict.fromkeys(parameters)
    generator = torch.Generator().manual_seed(_SEED)
    weights = [torch.rand(item.shape, generator=generator).to(item.device) for item in ends]
    found = torch.autograd.grad(ends, list(parameters.values()), weights, allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not one.numel():
        return True
    size = max(1.0, float(one.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return torch.allclose(one, other, rtol=_RTOL, atol=_ATOL * size, equal_nan=True)
