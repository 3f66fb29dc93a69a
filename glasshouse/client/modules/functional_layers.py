"""Functions that torch.nn also has as modules: activations, pooling, dropout, padding."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from glasshouse.client.modules.calls import KNOWN, Caller, known
from glasshouse.client.modules.source_lines import Stopped
from glasshouse.client.modules.values import Ref

_AS_LAYERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "leaky_relu": ("LeakyReLU", ("negative_slope",)),
    "elu": ("ELU", ("alpha",)),
    "celu": ("CELU", ("alpha",)),
    "selu": ("SELU", ()),
    "silu": ("SiLU", ()),
    "mish": ("Mish", ()),
    "gelu": ("GELU", ("approximate",)),
    "relu6": ("ReLU6", ()),
    "softplus": ("Softplus", ("beta", "threshold")),
    "softsign": ("Softsign", ()),
    "softmin": ("Softmin", ("dim",)),
    "hardtanh": ("Hardtanh", ("min_val", "max_val")),
    "hardswish": ("Hardswish", ()),
    "hardsigmoid": ("Hardsigmoid", ()),
    "logsigmoid": ("LogSigmoid", ()),
    "tanhshrink": ("Tanhshrink", ()),
    "softshrink": ("Softshrink", ("lambd",)),
    "hardshrink": ("Hardshrink", ("lambd",)),
    "threshold": ("Threshold", ("threshold", "value")),
    "glu": ("GLU", ("dim",)),
    "pixel_shuffle": ("PixelShuffle", ("upscale_factor",)),
    "pixel_unshuffle": ("PixelUnshuffle", ("downscale_factor",)),
    "local_response_norm": ("LocalResponseNorm", ("size", "alpha", "beta", "k")),
    "interpolate": (
        "Upsample",
        ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"),
    ),
    "pairwise_distance": ("PairwiseDistance", ("p", "eps", "keepdim")),
}
for _size in "123":
    _AS_LAYERS[f"max_pool{_size}d"] = (
        f"MaxPool{_size}d",
        ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    )
    _rest = ("ceil_mode", "count_include_pad", *(("divisor_override",) if _size != "1" else ()))
    _AS_LAYERS[f"avg_pool{_size}d"] = (
        f"AvgPool{_size}d",
        ("kernel_size", "stride", "padding", *_rest),
    )
    for _kind in ("avg", "max"):
        _AS_LAYERS[f"adaptive_{_kind}_pool{_size}d"] = (
            f"Adaptive{_kind.title()}Pool{_size}d",
            ("output_size", *(("return_indices",) if _kind == "max" else ())),
        )
_DROPOUTS = {
    "dropout": "Dropout",
    "dropout1d": "Dropout1d",
    "dropout2d": "Dropout2d",
    "dropout3d": "Dropout3d",
    "alpha_dropout": "AlphaDropout",
    "feature_alpha_dropout": "FeatureAlphaDropout",
}


def _as_layer(name: str, kind: str, keys: tuple[str, ...]) -> None:
    num_inputs = 2 if name == "pairwise_distance" else 1

    @known(name)
    def draw(to: Caller, *given: Any, **named: Any) -> Ref:
        inputs, rest = list(given[:num_inputs]), given[num_inputs:]
        inputs += [named.pop(key) for key in ("input", "self") if key in named]
        args = dict(zip(keys, rest, strict=False))
        args |= {key: value for key, value in named.items() if key in keys}
        unknown = {
            key: value
            for key, value in named.items()
            if key not in (*keys, "inplace", "antialias", "_stacklevel") and value is not None
        }
        if unknown or len(rest) > len(keys) + 1 or named.get("antialias"):
            raise Stopped(f"{name} with {', '.join(unknown) or 'these arguments'}")
        return to.draw(kind, inputs, args=_without_defaults(kind, args))


def _without_defaults(kind: str, args: dict[str, Any]) -> dict[str, Any]:
    usual = inspect.signature(getattr(torch.nn, kind).__init__).parameters
    listed = {key: list(v) if isinstance(v, tuple) else v for key, v in args.items()}
    return {key: value for key, value in listed.items() if value != usual[key].default}


for _name, (_kind, _keys) in _AS_LAYERS.items():
    _as_layer(_name, _kind, _keys)


@known(*_DROPOUTS)
def _dropout(  # noqa: ANN202
    to: Caller,
    input: Any,  # noqa: A002
    p: float = 0.5,
    training: Any = None,
    inplace: bool = False,
):
    del inplace
    if training is False:
        return input
    return to.draw(_DROPOUTS[to.name], [input], args={"p": p})


@known("pad")
def _pad(  # noqa: ANN202
    to: Caller,
    input: Any,  # noqa: A002
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
):
    size = len(pad) // 2
    kinds = {"constant": "ConstantPad", "reflect": "ReflectionPad", "replicate": "ReplicationPad"}
    if mode not in (*kinds, "circular") or size not in (1, 2, 3) or len(pad) % 2:
        raise Stopped(f"pad of {len(pad)} sizes in the mode {mode!r}")
    kind = f"{kinds.get(mode, 'CircularPad')}{size}d"
    args: dict[str, Any] = {"padding": list(pad)}
    if mode == "constant":
        args["value"] = value or 0.0
    return to.draw(kind, [input], args=args)


__all__ = ["KNOWN"]
