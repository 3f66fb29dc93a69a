"""Find the checkpoint that a request refers to: by its id, or as a version of a published model."""

from api.http.access import Caller
from glasshouse.errors import CheckpointNotFound
from glasshouse.spec.model_names import parse_model_reference
from models import published_models
from models.database import Transaction
from models.jobs import checkpoints
from models.tables import Checkpoint


def find_checkpoint(
    tx: Transaction, reference: str, caller: Caller, *, hold: bool = False
) -> Checkpoint:
    """Return the checkpoint of a reference: ``ckpt_…``, ``name``, ``name@alias``, ``name:version``.

    ``hold``: keep it until the job that needs it is stored, as `checkpoints.hold` does.

    Raises:
        CheckpointNotFound: No visible checkpoint has the id, or the text is no reference.
        ModelNotFound, ModelVersionNotFound: There is no such model or version.
    """
    wanted = parse_model_reference(reference)
    if reference.startswith("ckpt_"):
        found = checkpoints.get(tx, reference, caller.sees)
    elif wanted is None:
        detail = f"{reference[:100]!r} is neither the id of a checkpoint (ckpt_…) nor a model:"
        raise CheckpointNotFound(f"{detail} write name, name@alias or name:version.")
    else:
        model = published_models.get(tx, wanted.name, owner=caller.owner, sees=caller.sees)
        found = published_models.version(tx, model, wanted).checkpoint
    if hold:
        checkpoints.hold(tx, found.id)
    return found
