"""Apply the options that layers set for their own parameters: init, learning rate, decay, L1.

Depends on torch and graphs, not on data or jobs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core import arguments
from engine.core.problems import Findings, SpecProblems, one
from engine.core.shards import own_parts
from engine.optim.dense_and_sparse import SPARSE_TYPES, DenseAndSparse, half_of, join_rows
from engine.optim.optimizers import AT_SPARSE, build_optimizer, checked, sparse_parameters
from glasshouse.spec import Graph, Layer, Optimizer, ParameterInit

_RATES = ("lr_scale", "weight_decay", "l1")
_SCALE, _OWN = "lr_scale", "own"
"""What a group of parameters has in addition to torch's arguments."""
_DRAWN = ("normal_", "uniform_", "trunc_normal_")

Group = dict[str, Any]


class OwnedParameters(NamedTuple):
    """A layer and its parameters. Shared parameters belong to the first layer that has them."""

    position: int
    layer: Layer
    module: nn.Module

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the layer."""
        return dict(self.module.named_parameters())


def owned(
    graph: Graph, network: nn.Module, elsewhere: Mapping[str, nn.Module] | None = None
) -> Iterator[OwnedParameters]:
    """Yield the layers of a graph that have a module of their own in this process.

    ``elsewhere``: modules of other processes to yield too, by name.
    """
    # get_submodule fails for a layer named "half"
    modules = {**dict(network.named_children()), **(elsewhere or {})}
    for position, layer in enumerate(graph.layers):
        if layer.shared_with is None and layer.name in modules:
            yield OwnedParameters(position, layer, modules[layer.name])


def value_for(spec: Any, name: str) -> Any:
    """Return an option's value for one parameter of its layer; None: not set.

    ``spec``: one value for all, or values by globs, of which the first that matches counts.
    """
    if not isinstance(spec, dict):
        return spec
    known: Mapping[str, Any] = spec
    return next((value for glob, value in known.items() if fnmatchcase(name, glob)), None)


# --- groups of parameters --------------------------------------------------------------------


def make_optimizer(spec: Optimizer, graph: Graph, network: nn.Module) -> torch.optim.Optimizer:
    """Create the optimizer of a network with the options of its layers."""
    sparse = sparse_parameters(network)
    if spec.sparse is None:
        made = of_sparse = _scaled(spec, parameter_groups(graph, network))
    else:
        rest = {
            f"{item.layer.name}.{n}" for item in owned(graph, network) for n in item.parameters()
        }
        dense = _scaled(spec, parameter_groups(graph, network, rest - sparse))
        of_sparse = _scaled(spec.of_sparse, parameter_groups(graph, network, sparse))
        made = DenseAndSparse(dense, of_sparse)
    if sparse and isinstance(of_sparse, torch.optim.SGD):
        of_sparse.register_step_pre_hook(join_rows)
    penalise(made, graph, network, spec.l1, without=() if spec.sparse is None else sparse)
    return made


def _scaled(spec: Optimizer, groups: list[nn.Parameter] | list[Group]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = build_optimizer(spec, groups)
    for group in made.param_groups:
        if _SCALE in group:
            group["lr"] *= group[_SCALE]
    return made


def parameter_groups(
    graph: Graph, network: nn.Module, names: Collection[str] | None = None
) -> list[nn.Parameter] | list[Group]:
    """Return the trained parameters for an optimizer, in groups if layers differ in options.

    ``names``: only these. The first group has no options, even if no parameter is in it: its
    arguments are the job's. All processes of a pipeline have the same groups.
    """
    base: list[nn.Parameter] = []
    others: dict[tuple[float, float | None], list[nn.Parameter]] = {}
    elsewhere: Mapping[str, nn.Module] = getattr(network, "elsewhere", {})
    for item in owned(graph, network, elsewhere):
        for name, parameter in item.parameters().items():
            scale = value_for(item.layer.lr_scale, name)
            own = 1.0 if scale is None else scale, value_for(item.layer.weight_decay, name)
            is_meant = names is None or f"{item.layer.name}.{name}" in names
            if parameter.requires_grad and is_meant:
                kept = base if own == (1.0, None) else others.setdefault(own, [])
                kept += [] if item.layer.name in elsewhere else [parameter]
    if not others:
        return [{"params": base}] if elsewhere else base  # torch refuses an empty list
    return [{"params": base}, *(_group(*own, found) for own, found in others.items())]


def _group(scale: float, weight_decay: float | None, parameters: list[nn.Parameter]) -> Group:
    group: Group = {"params": parameters, _SCALE: scale, _OWN: []}
    if weight_decay is None:
        return group
    return group | {"weight_decay": weight_decay, _OWN: ["weight_decay"]}


def scales(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the factor of each group's learning rate when a schedule gives one rate for all."""
    found = [group.get(_SCALE, 1.0) for group in half_of(optimizer, "dense").param_groups]
    if isinstance(optimizer, DenseAndSparse):
        dense, sparse = (half.defaults["lr"] for half in (optimizer.dense, optimizer.sparse))
        ratio = sparse / dense if dense else 1.0
        found += [ratio * group.get(_SCALE, 1.0) for group in optimizer.sparse.param_groups]
    return found


def set_arguments(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Change arguments of an optimizer. Layers' own values stay, and ``lr_scale`` is reapplied."""
    for group in optimizer.param_groups:
        own = group.get(_OWN, ())
        group.update({name: value for name, value in values.items() if name not in own})
        if "lr" in values:
            group["lr"] = values["lr"] * group.get(_SCALE, 1.0)


def own_decays(graph: Graph, network: nn.Module) -> dict[str, float]:
    """Return the weight decay of each parameter whose layer sets one."""
    return {
        f"{item.layer.name}.{name}": own
        for item in owned(graph, network)
        for name in item.parameters()
        if (own := value_for(item.layer.weight_decay, name)) is not None
    }


# --- L1 --------------------------------------------------------------------------------------


def penalise(
    optimizer: torch.optim.Optimizer,
    graph: Graph,
    network: nn.Module,
    l1: float,
    without: Collection[str] = (),
) -> None:
    """Add l1 times the sign of each parameter to its gradient just before each update.

    torch adds ``weight_decay`` at the same point, and PaddlePaddle 2 its L1Decay: after clipping.
    ``without``: parameters that have sparse gradients and an optimizer of their own.
    """
    found: dict[float, list[nn.Parameter]] = {}
    for item in owned(graph, network):
        for name, parameter in item.parameters().items():
            own = value_for(item.layer.l1, name)
            rate = l1 if own is None else own
            is_meant = f"{item.layer.name}.{name}" not in without
            if parameter.requires_grad and rate and is_meant:
                found.setdefault(rate, []).append(parameter)
    if not found:
        return

    @torch.no_grad()
    def add(_optimizer: torch.optim.Optimizer, _args: Any, _keywords: Any) -> None:
        for rate, parameters in found.items():
            there = [item for item in parameters if item.grad is not None]
            if there:
                signs = torch._foreach_sign(own_parts(there))  # pyright: ignore
                gradients = own_parts([item.grad for item in there if item.grad is not None])
                torch._foreach_add_(gradients, signs, alpha=rate)  # pyright: ignore

    optimizer.register_step_pre_hook(add)


# --- initial values --------------------------------------------------------------------------


@cache
def init_functions() -> dict[str, Callable[..., object]]:
    """Return the functions of torch.nn.init that fill a tensor, by name."""
    return {
        name: function
        for name, function in sorted(vars(nn.init).items())
        if name.endswith("_") and not name.startswith("_") and callable(function)
    }


def fill(graph: Graph, network: nn.Module) -> None:
    """Initialize parameters as their layers say, in the graph's order."""
    for item in owned(graph, network):
        if item.layer.init is None:
            continue
        for name, parameter in item.parameters().items():
            if (spec := value_for(item.layer.init, name)) is not None:
                _made(spec, "")(parameter)
        _keep_padding(item.module)


def _made(spec: ParameterInit, pointer: str) -> Callable[[Tensor], object]:
    function = init_functions().get(spec.type)
    if function is None:
        listed = ", ".join(init_functions())
        detail = f"torch.nn.init has no function {spec.type!r}; it has: {listed}"
        raise one(f"{pointer}/type", detail, "unknown")
    known = arguments.read_signature(function)
    known.pop("tensor", None)
    args = checked(known, spec.args, f"{pointer}/args", spec.type)
    return lambda tensor: function(tensor, **args)


@torch.no_grad()
def _keep_padding(module: nn.Module) -> None:
    """Set the row of a padding index to zero, as torch does. It is never trained."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
        module.weight[module.padding_idx].fill_(0)


# --- checks ----------------------------------------------------------------------------------


def check_options(
    graph: Graph, network: nn.Module, optimizer: Optimizer, findings: Findings
) -> None:
    """Report options of layers that do not apply."""
    tiny = [nn.Parameter(torch.ones(4, 4))]
    takes = build_optimizer(optimizer, tiny).defaults
    sparse = sparse_parameters(network)
    if optimizer.sparse is None:
        sparse_takes, rates, at = takes, {"l1": optimizer.l1}, "/optimizer"
    else:
        sparse_takes = build_optimizer(optimizer.of_sparse, tiny, AT_SPARSE).defaults
        rates, at = {"l1": 0.0}, AT_SPARSE
    rates["weight_decay"] = float(sparse_takes.get("weight_decay", 0.0))
    for item in owned(graph, network):
        is_sparse = any(f"{item.layer.name}.{name}" in sparse for name in item.parameters())
        _check_layer(item, sparse_takes if is_sparse else takes, findings)
        for name, parameter in item.parameters().items():
            _try_init(item, name, parameter, findings)
        if optimizer.of_sparse.type in SPARSE_TYPES:  # others fail for more than their decay
            _check_sparse(item, rates, sparse, at, findings)


def _check_layer(item: OwnedParameters, takes: Mapping[str, Any], findings: Findings) -> None:
    layer, names = item.layer, [*item.parameters()]
    pointer = f"/network/layers/{item.position}"
    for option in ("init", *_RATES, "grad_clip"):
        value = getattr(layer, option)
        if value is None:
            continue
        if not names:
            _refuse(findings, f"{pointer}/{option}", layer, "has no parameters", "no_parameters")
        elif not layer.trainable and option != "init":
            detail = f"is not trainable: leave out {option}"
            _refuse(findings, f"{pointer}/{option}", layer, detail, "not_trainable")
        elif isinstance(value, dict):
            _check_globs(findings, f"{pointer}/{option}", layer, [*value], names)  # pyright: ignore[reportUnknownArgumentType]
    if not layer.trainable and not names:
        _refuse(findings, f"{pointer}/trainable", layer, "has no parameters", "no_parameters")
    if layer.weight_decay is not None and "weight_decay" not in takes:
        detail = "cannot have a weight_decay: the optimizer knows none"
        _refuse(findings, f"{pointer}/weight_decay", layer, detail, "no_argument")


def _check_sparse(
    item: OwnedParameters,
    rates: Mapping[str, float],
    sparse: Collection[str],
    at: str,
    findings: Findings,
) -> None:
    """Refuse options that would change every row of a parameter whose gradients have few rows."""
    for name, parameter in item.parameters().items():
        if f"{item.layer.name}.{name}" not in sparse or not parameter.requires_grad:
            continue
        for option, of_all in rates.items():
            own = value_for(getattr(item.layer, option), name)
            if of_all if own is None else own:
                of_job = "/optimizer/l1" if option == "l1" else f"{at}/args/{option}"
                pointer = of_job if own is None else f"/network/layers/{item.position}/{option}"
                detail = f"has sparse gradients, and {option} would change every row at every step:"
                _refuse(findings, pointer, item.layer, f"{detail} give the layer 0", "sparse")


def _refuse(findings: Findings, pointer: str, layer: Layer, detail: str, code: str) -> None:
    findings.problem(pointer, f"layer {layer.name!r} ({layer.type}) {detail}", code)


def _check_globs(
    findings: Findings, pointer: str, layer: Layer, globs: Sequence[str], names: Sequence[str]
) -> None:
    left = [*names]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in left):
            detail = f"has no parameter {glob!r} that is not named before; it has:"
            _refuse(
                findings, f"{pointer}/{glob}", layer, f"{detail} {', '.join(names)}", "no_match"
            )
        left = [name for name in left if not fnmatchcase(name, glob)]


def _try_init(item: OwnedParameters, name: str, parameter: Tensor, findings: Findings) -> None:
    known = item.layer.init or {}
    glob = next((glob for glob in known if fnmatchcase(name, glob)), None)
    if glob is None:
        return
    spec, pointer = known[glob], f"/network/layers/{item.position}/init/{glob}"
    try:
        function = _made(spec, pointer)
    except SpecProblems as error:
        findings.problems.extend(error.problems)
        return
    try:
        function(torch.empty(parameter.shape, device="meta"))
        if spec.type in _DRAWN:  # these check their arguments only when they draw numbers
            function(torch.empty(1, device="cpu"))
    except (ValueError, RuntimeError, TypeError, ZeroDivisionError) as cause:
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0][:300]
        shape = list(parameter.shape)
        detail = f"{spec.type} cannot fill {name!r} of shape {shape} (torch: {reason})"
        findings.problem(f"{pointer}/args" if spec.args else pointer, detail, "init")
