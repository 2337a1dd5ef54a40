"""The command `serve`: the REST service without Airflow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.estimator.errors import BadInput
from trainwright.tasks.cli.options import Debug, Json, print_json

if TYPE_CHECKING:
    from trainwright.tasks.service.auth import Role


def serve(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: any free one")] = 8090,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="token for clients that may start runs; FILE.read: for clients that may only "
            "read. Created if missing. Default: under TRAINWRIGHT_HOME",
        ),
    ] = None,
    allow: Annotated[
        list[Path] | None,
        typer.Option(
            "--allow",
            metavar="FOLDER",
            help="another folder whose models and data clients may name; repeatable",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="requests computed at the same time; default: one per core")
    ] = None,
    queue: Annotated[
        int, typer.Option(help="requests that may wait; further ones get status 429")
    ] = 32,
    timeout: Annotated[float, typer.Option(help="seconds that a request may take")] = 120.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve plans, estimates, structures and the page over HTTP."""
    import asyncio

    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.settings import Settings

    try:
        from trainwright.tasks.service import server
    except ModuleNotFoundError as error:
        raise BadInput(
            f"serve: {error.name} is missing; install the extra `service` of trainwright"
        ) from None
    from trainwright.tasks.service.auth import checked, token_from
    from trainwright.tasks.service.service import Service, ServiceLimits

    for name, value, least in (
        ("--workers", 1 if workers is None else workers, 1),
        ("--queue", queue, 0),
        ("--timeout", timeout, 1),
    ):
        if not least <= value < math.inf:
            raise BadInput(f"{name}: got {value:g}; allowed: {least} or more")
    for folder in allow or ():
        if not folder.is_dir():
            raise BadInput(f"--allow: got {folder}; there is no such folder")
    settings = Settings.from_environment()
    given = settings.service_tokens()
    file = token_file or settings.home / "service" / "token"
    tokens: dict[Role, str] = {
        role: checked(token, "the token in the environment") for role, token in given.items()
    }
    if token_file is not None or "run" not in given:
        tokens["run"] = token_from(file)
        tokens["read"] = token_from(file.with_name(file.name + ".read"))
    bounds = ServiceLimits(
        waiting=queue, timeout_s=timeout, **({"at_once": workers} if workers else {})
    )
    with server.listening(host, port) as listener:
        address = server.address_of(host, listener)
        where = (
            str(file)
            if token_file is not None or "run" not in given
            else "TRAINWRIGHT_SERVICE_TOKEN"
        )

        def ready(network: str) -> None:
            if as_json:
                print_json({"address": address, "token": where, "model_network": network})
            else:
                line = f"trainwright at {address}, token: {where} (model code: {network})"
                console.err.print(line, markup=False, soft_wrap=True)

        asyncio.run(server.serve(Service(settings, bounds, allow or ()), tokens, listener, ready))
