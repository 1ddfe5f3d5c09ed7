"""The command line: `pdserve up`, `generate`, `status` and so on. What a command needs is imported when it runs.

Exit codes: 0 done; 1 it could not be done now; 2 it was asked for wrongly. Errors are one line.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from cluster.flags import (
    AuditFlags,
    ChaosFlags,
    DoctorFlags,
    DrainFlags,
    GenerateFlags,
    RouterFlags,
    UpFlags,
    flags_of,
)
from pdserve import __version__
from pdserve.errors import ConfigError, InvalidRequest, PdserveError

app = typer.Typer(
    name="pdserve",
    help="A prefill/decode server for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
kv = typer.Typer(help="Look after KV pages.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(kv, name="kv")


def main() -> None:
    """The `pdserve` command."""
    app()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command("up")
@flags_of(UpFlags)
def up_command(flags: UpFlags) -> None:
    """Run a cluster in the foreground until Ctrl-C. Prints `pdserve ready grpc=… redis=… pid=…`.

    cluster.yaml takes more settings than there are flags; an unknown key in it lists them all.
    """
    with _errors():
        try:
            from cluster.up import up
        except ImportError as error:
            hint = "`pdserve up` needs the extra 'cluster': pip install 'pdserve[cluster]'"
            raise ConfigError(f"{hint} ({error})") from None
        from pdserve.config import load_config

        logging.basicConfig(level=logging.WARNING, format="pdserve: %(message)s")
        up(load_config(flags.config, flags.settings()), flags.ready_file)


@app.command("generate")
@flags_of(GenerateFlags)
def generate_command(flags: GenerateFlags) -> None:
    """Stream an answer to standard output; greedy (temperature 0) unless told otherwise."""
    with _errors():
        from cluster.generate import generate

        generate(flags)


@app.command("status")
@flags_of(RouterFlags)
def status_command(flags: RouterFlags) -> None:
    """Show the workers that a router sees.

    BUSY, MFU and MBU are of the last five seconds: the share of them inside steps of the engine, and of that time the
    share of the machine's FLOPs and of its memory bandwidth. `pdserve doctor` explains them.
    """
    with _errors():
        from cluster.status import status

        status(flags)


@app.command("doctor")
@flags_of(DoctorFlags)
def doctor_command(flags: DoctorFlags) -> None:
    """Print what this machine allows: floors for a model, how many requests fit, and what the workers reach of it.

    Measures memory bandwidth and matrix products with the threads of one worker (two seconds; on a quiet machine), or
    takes them from a data sheet. With --address the workers' own measurements count, and their last five seconds.

    No prefill is quicker than its FLOPs, and no decode step quicker than reading weights and KV, or than its FLOPs.
    The textbook's figures count every parameter twice per token, or read once per step, and nothing else.
    """
    with _errors():
        from cluster.doctor import doctor

        doctor(flags)


@app.command("drain")
@flags_of(DrainFlags)
def drain_command(flags: DrainFlags) -> None:
    """Let a worker leave the cluster for good.

    It takes no new requests; those that run finish, or go on elsewhere after the limit. Returns once the worker has
    left; exits with 1 when it was lost before that, and comes back. SIGTERM to a worker's process drains it too, with
    a limit of 10 s.
    """
    with _errors():
        from cluster.control import drain

        drain(flags)


@kv.command("audit")
@flags_of(AuditFlags)
def audit_command(flags: AuditFlags) -> None:
    """Check who holds which KV pages: routers and workers must agree.

    Prints every worker's pages and their holders. Exits with 1 when a page has leaked, when two views still differ
    after a second, or when a worker does not answer.
    """
    with _errors():
        from cluster.audit import audit

        if not audit(flags):
            raise typer.Exit(1)


@app.command("chaos")
@flags_of(ChaosFlags)
def chaos_command(flags: ChaosFlags) -> None:
    """Harm a worker, in a cluster started with --chaos.

    No request should fail, and no token be lost, doubled or changed.
    """
    with _errors():
        from cluster.control import chaos

        chaos(flags)


@contextmanager
def _errors() -> Iterator[None]:
    """Every error of ours becomes one line and an exit code."""
    try:
        yield
    except (ConfigError, InvalidRequest) as error:
        _fail(error, 2)
    except PdserveError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fail(error: PdserveError, code: int) -> NoReturn:
    typer.echo(f"pdserve: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from None


if __name__ == "__main__":
    main()
