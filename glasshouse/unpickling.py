"""No process of the service opens a pickle: a pickle is a program of whoever wrote it.

``refuse_unpickling`` makes the interpreter itself refuse the step with which a pickle names code to
be called. What is forked from the process inherits it; nothing can take it back. It costs nothing
where nothing is unpickled, but for a function call per audited event (opened files, imports,
started processes), of which a training step has none.
"""

import sys
from typing import Any


class UnpicklingRefused(RuntimeError):
    """Something tried to open a pickle."""


def refuse_unpickling() -> None:
    """From now on, in this process and its forks, no pickle finds the code that it names."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        module, name = arguments[:2]
        raise UnpicklingRefused(f"a pickle asked for {module}.{name}; nothing here opens pickles")
