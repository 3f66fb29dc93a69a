"""Which values of the requests to a model are never recorded."""

from collections.abc import Iterable, Sequence

from engine.core.tensor_names import root
from engine.network.network import Network
from engine.serving.model_inputs import ModelInputs
from glasshouse.spec import RequestLog, Trained
from glasshouse.spec.jobs.request_log import named_by


def names_of(models: Iterable[Trained]) -> list[str]:
    """Return the names that ``redact`` may have: of the fields and columns of models."""
    names: dict[str, None] = {}
    for trained in models:
        for name, field in trained.data.fields.items():
            names |= dict.fromkeys((name, *field.source_columns))
    return [*names]


class Redaction:
    """The fields, columns and outputs of one model whose values are not recorded."""

    def __init__(self, globs: Sequence[str], inputs: ModelInputs, network: Network) -> None:
        """``globs``: of ``redact``. ``network``: with its weights."""
        fields = inputs.trained_by.data.fields
        columns = {name: field.source_columns or (name,) for name, field in fields.items()}
        self.fields, self.columns = named_by(globs, columns)
        self._inputs = inputs
        self._exposing = self._find_exposing(network) if self.fields else frozenset[str]()

    def is_redacted(self, output: str) -> bool:
        """Return whether values of a redacted field could be read from an output.

        That is so for layers inside of the network, and for outputs of the network that a field
        reaches without passing any weights.
        """
        if self.fields.isdisjoint(self._inputs.needed((output,))):
            return False
        is_own = root(output) in {root(name) for name in self._inputs.default_outputs}
        return not is_own or root(output) in self._exposing

    def _find_exposing(self, network: Network) -> frozenset[str]:
        """Return the layers that a redacted field reaches without passing any weights."""
        found: set[str] = set()
        for layer in self._inputs.trained_by.network.layers:  # in the order of computation
            read = {root(name) for name in layer.reads}
            module = network.layers.get(layer.name)  # None: no output of the network needs it
            has_weights = module is not None and any(True for _ in module.parameters())
            if not has_weights and (read & found or read & self.fields):
                found.add(layer.name)
        return frozenset(found)


def problems_of(log: RequestLog, models: Iterable[Trained]) -> list[tuple[str, str]]:
    """Return what is wrong with ``redact`` for models: pointers and details."""
    found = log.unmatched(names_of(models))
    return [(f"/request_log/redact/{number}", detail) for number, detail in found]
