"""Inference outputs as a table file with one line per row. The suffix selects the format."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse import jsonio
from glasshouse.client.data.tensors import Array

TABLES = (".csv", ".jsonl", ".parquet")


def write_table(path: Path, outputs: Mapping[str, Array]) -> None:
    """Write outputs as csv, jsonl or parquet.

    A csv has one column per value of a row (``fc/value/0``); the other formats have lists.

    Raises:
        ValueError: the outputs differ in their number of rows, or a csv cannot hold their shape.
        ImportError: pyarrow, which parquet requires, is not installed.
    """
    sizes = {name: len(array) for name, array in outputs.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"the outputs have different numbers of rows, {sizes}: save as .npz or .safetensors"
        )
    if path.suffix == ".csv":
        _write_csv(path, outputs)
    elif path.suffix == ".jsonl":
        columns = {name: array.tolist() for name, array in outputs.items()}
        with path.open("w", encoding="utf-8") as file:
            for row in zip(*columns.values(), strict=True):
                file.write(jsonio.dumps(dict(zip(columns, row, strict=True))) + "\n")
    else:
        import pyarrow as pa  # noqa: PLC0415 (a large library, of parquet only) # pyright: ignore[reportMissingTypeStubs]
        import pyarrow.parquet as pq  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs]

        columns = {name: _listed(array) for name, array in outputs.items()}
        table: Any = pa.table(columns)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        pq.write_table(table, path)  # pyright: ignore[reportUnknownMemberType]


def _listed(array: Array) -> Any:
    return array if array.ndim == 1 else array.tolist()


def _write_csv(path: Path, outputs: Mapping[str, Array]) -> None:
    columns: dict[str, list[Any]] = {"row": list(range(len(next(iter(outputs.values())))))}
    for name, array in outputs.items():
        if array.ndim == 1:
            columns[name] = array.tolist()
        elif array.ndim == 2:
            columns |= {f"{name}/{n}": part.tolist() for n, part in enumerate(np.asarray(array).T)}
        else:
            detail = f"{name} has rows of shape {list(array.shape[1:])}"
            raise ValueError(f"{detail}, which csv does not support: save as .jsonl or .npz")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
