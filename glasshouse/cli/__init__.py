"""The command line ``glasshouse``. It uses the client, and thus only the public API."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from glasshouse import __version__
from glasshouse.cli.jobs import (
    compare,
    control,
    evaluation,
    prediction,
    probes,
    requests,
    results,
    serving,
)
from glasshouse.cli.jobs import jobs as job_commands
from glasshouse.cli.jobs import logs as log_commands
from glasshouse.cli.resources import checkpoints, datasets, models, quotas, webhooks, workers
from glasshouse.cli.service import maintenance
from glasshouse.cli.service import service as service_commands
from glasshouse.cli.terminal import exit_codes, output
from glasshouse.cli.terminal.help_text import Command, Group
from glasshouse.errors import GlasshouseError

app = typer.Typer(
    name="glasshouse",
    help="Submit and monitor training jobs, inspect layers, and run the service.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


@app.callback(invoke_without_command=True)
def _begin(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    if json and not version:
        raise typer.BadParameter("put it after the command", param_hint="--json")
    if version:
        shown = {"version": __version__}
        output.document(shown) if json else output.line(f"glasshouse {__version__}")
        context.exit()
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


app.command(cls=Command)(service_commands.up)
app.command(cls=Command)(service_commands.down)
app.command(cls=Command)(service_commands.status)
app.command(cls=Command)(service_commands.doctor)
app.command("open", cls=Command)(service_commands.open_page)
app.command(cls=Command)(maintenance.backup)
app.command(cls=Command)(maintenance.restore)
app.command(cls=Command)(maintenance.purge)
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(workers.app, name="workers")
app.command(cls=Command)(job_commands.submit)
app.command(cls=Command)(job_commands.watch)
app.command("jobs", cls=Command)(job_commands.list_jobs)
app.command(cls=Command)(job_commands.show)
app.command(cls=Command)(job_commands.delete)
app.command(cls=Command)(compare.compare)
app.command(cls=Command)(log_commands.logs)
app.command(cls=Command)(job_commands.cancel)
app.command(cls=Command)(control.pause)
app.command(cls=Command)(control.resume)
app.command(cls=Command)(control.retry)
app.command(cls=Command)(control.fork)
app.command("set", cls=Command)(control.set_)
app.command(cls=Command)(probes.probe)
app.command(cls=Command)(results.metrics)
app.command(cls=Command)(results.layers)
app.command(cls=Command)(results.infer)
app.command(cls=Command)(evaluation.evaluate)
app.command(cls=Command)(serving.serve)
app.command(cls=Command)(prediction.predict)
app.command(cls=Command)(requests.requests)
app.add_typer(datasets.app, name="datasets")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(models.app, name="models")
app.command(cls=Command)(datasets.devices)
app.command(cls=Command)(workers.system)
app.command(cls=Command)(quotas.quota)
for process in (service_commands.api, service_commands.worker, service_commands.migrate):
    app.command(
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(process)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    output.never_fail_to_print()
    try:
        app(given, prog_name="glasshouse")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else exit_codes.ERROR
        if code == exit_codes.USAGE and "--json" in given:
            output.misused()
        return code
    except (GlasshouseError, OSError, ValueError) as error:
        code = exit_codes.code_of(error)
        output.failure(error, code, as_json="--json" in given)
        return code
    return exit_codes.OK
