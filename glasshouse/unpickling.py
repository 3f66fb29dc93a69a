"""Prevents unpickling in the processes of the service: a pickle can run arbitrary code.

There are two ways, both inherited by forks. ``refuse_unpickling`` adds an audit hook, which cannot
be removed, that refuses the lookup of code named in a pickle. It costs a function call per audited
event; torch has twelve of them per training step. ``seal_pickle`` costs nothing: it replaces the
functions that load pickles, for processes that train.
"""

import _pickle
import pickle
import sys
from typing import Any, NoReturn


class UnpicklingRefused(RuntimeError):
    """An attempt to load a pickle."""


def refuse_unpickling() -> None:
    """Refuse, in this process and its forks, the lookup of code named in a pickle."""
    sys.addaudithook(_refuse)


def seal_pickle() -> None:
    """Replace, in this process and its forks, the functions that load pickles."""
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
