"""Commands for published models: publish, show, move aliases, delete."""

from typing import Annotated

import typer

from glasshouse.cli.arguments import completion, references
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.help_text import Command, group
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client, Model
from glasshouse.errors import NotFoundError
from glasshouse.spec.model_names import parse_model_reference
from glasshouse.suggestions import did_you_mean

ModelName = Annotated[str, completion.named("MODEL", completion.models, "The name of the model.")]


def list_models(json: Json = False) -> None:
    """List published models, newest first."""
    with Client() as client:
        found = list(client.models.list())
    if json:
        output.document([model.data for model in found])
        return
    rows = ([one.name, one.num_versions, one.latest, _aliases(one), _served(one)] for one in found)
    columns = ["model", "versions", "latest", "aliases", "served"]
    output.table(columns, rows, short={"model", "aliases"}, numbers={"versions", "latest"})


app = group("List, publish, show and delete models, and move their aliases.", list_models)


@app.command(cls=Command)
def publish(
    model: ModelName,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint, or a job whose newest checkpoint is published: the id or an id "
            "prefix, the name, or 'last'; or a version of a model: mnist@candidate.",
            autocompletion=completion.sources,
        ),
    ],
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", help="An alias that names the new version; repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Publish a checkpoint as a new version of a model. Prints the version."""
    with Client() as client:
        chosen = references.trained_id(client, source)
        made = client.models.publish(model, chosen, aliases=alias or ())
    if json:
        output.document(made.data)
    else:
        output.line(made.id)
        output.message(f"{made.checkpoint} of step {made.step}")


@app.command(cls=Command)
def show(model: ModelName, json: Json = False) -> None:
    """Show the versions of a model, newest first, with their aliases."""
    with Client() as client:
        found = client.models.get(model)
    if json:
        output.document(found.data)
        return
    jobs = {version: _jobs(found, version) for version in (one.version for one in found.versions)}
    rows = (
        [
            one.version,
            ", ".join(one.aliases) or "-",
            one.checkpoint,
            one.step,
            jobs[one.version],
            one.created_at,
        ]
        for one in found.versions
    )
    columns = ["version", "aliases", "checkpoint", "step", "served by", "published"]
    output.table(
        columns,
        rows,
        short={"aliases"},
        numbers={"version", "step"},
        optional=["published"],
    )
    for one in found.served_by:
        if one["version"] is None:
            output.message(f"{one['job']} serves {one['reference']}, and is {one['state']}")


@app.command(cls=Command)
def alias(
    model: ModelName,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Such as production.")],
    version: Annotated[
        int | None, typer.Argument(metavar="VERSION", help="The version that it names.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    json: Json = False,
) -> None:
    """Let an alias name another version of a model, or remove it."""
    if remove == (version is not None):
        raise typer.BadParameter("give either a version or --remove", param_hint="VERSION")
    with Client() as client:
        if remove:
            _check_alias(client.models.get(model), alias)
        found = client.models.set_aliases(model, {alias: version})
    if json:
        output.document(found.data)
    else:
        output.message(_aliases(found) if found.aliases else f"{found.name} has no aliases")


@app.command(cls=Command)
def delete(
    model: Annotated[
        str,
        completion.named(
            "MODEL", completion.models, "The name of the model; mnist:3 is one version of it."
        ),
    ],
    json: Json = False,
) -> None:
    """Delete a model, or one version of it. The checkpoints stay."""
    wanted = parse_model_reference(model)
    if wanted is not None and wanted.alias is not None:
        raise typer.BadParameter("delete a version by its number: mnist:3", param_hint="MODEL")
    with Client() as client:
        if wanted is None:
            client.models.delete(model)
        else:
            client.models.delete(wanted.name, wanted.number)
    if json:
        output.document({"model": model, "deleted": True})
    else:
        output.message(f"{model} deleted")


def _aliases(model: Model) -> str:
    """Aliases, each with the version that it names."""
    named = (f"{name} {number}" for name, number in sorted(model.aliases.items()))
    return ", ".join(named) or "-"


def _served(model: Model) -> str:
    """The versions that serve jobs serve."""
    versions = sorted({one["version"] for one in model.served_by if one["version"] is not None})
    if not versions and model.served_by:
        return str(model.served_by[0]["state"])
    return ", ".join(map(str, versions)) or "-"


def _jobs(model: Model, version: int) -> str:
    """The jobs that serve a version."""
    jobs = [str(one["job"]) for one in model.served_by if one["version"] == version]
    return ", ".join(dict.fromkeys(jobs)) or "-"


def _check_alias(model: Model, alias: str) -> None:
    """Check that a model has an alias.

    Raises:
        NotFoundError: it does not.
    """
    if alias not in model.aliases:
        detail = f"{model.name} has no alias {alias!r}{did_you_mean(alias, model.aliases)}"
        raise NotFoundError(detail, status_code=404, problem={"detail": detail})
