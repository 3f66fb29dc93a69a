"""No process of the service opens a pickle: a pickle is a program of whoever wrote it.

Two ways, both inherited by forks. ``refuse_unpickling`` makes the interpreter refuse the step with
which a pickle names code to be called, and nothing can take it back; it costs a function call for
each audited event, of which torch has twelve in a training step. ``seal_pickle`` costs nothing: it
takes the functions that open pickles away, for processes that train.
"""

import _pickle
import pickle
import sys
from typing import Any, NoReturn


class UnpicklingRefused(RuntimeError):
    """Something tried to open a pickle."""


def refuse_unpickling() -> None:
    """From now on, in this process and its forks, no pickle finds the code that it names."""
    sys.addaudithook(_refuse)


def seal_pickle() -> None:
    """From now on, in this process and its forks, the functions that open pickles are gone."""
    for module in (pickle, _pickle):
        for name in ("load", "loads", "_load", "_loads"):
            if hasattr(module, name):
                setattr(module, name, _sealed)
        for name in ("Unpickler", "_Unpickler"):
            if hasattr(module, name):
                setattr(module, name, _Sealed)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        module, name = arguments[:2]
        raise UnpicklingRefused(f"a pickle asked for {module}.{name}; nothing here opens pickles")


def _sealed(*_: Any, **__: Any) -> NoReturn:
    raise UnpicklingRefused("nothing here opens pickles")


class _Sealed:
    def __init__(self, *_: Any, **__: Any) -> None:
        _sealed()
