"""Commands for the embedded stack: up, status, down."""

from __future__ import annotations

from trainwright.tasks.cli.options import Debug, Json, print_json


def up(as_json: Json = False, debug: Debug = False) -> None:
    """Start the embedded stack: the S3 server, and Airflow with its UI."""
    from trainwright.estimator.named_file import require_space
    from trainwright.infra import local
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.errors import ServiceUnreachable
    from trainwright.tasks.settings import Settings, dags_folder

    home = Settings.from_environment().home
    try:
        with console.err.status("starting the S3 server and Airflow (first time: a minute)"):
            require_space(home / "lock", 0, "TRAINWRIGHT_HOME")
            local.up(home, dags_folder())
    except (OSError, TimeoutError) as error:
        raise ServiceUnreachable(str(error)) from error
    _stack(as_json)


def status(as_json: Json = False, debug: Debug = False) -> None:
    """Show which services of the embedded stack run, and their addresses."""
    _stack(as_json)


def down(as_json: Json = False, debug: Debug = False) -> None:
    """Stop the embedded stack. Stored data is kept."""
    from trainwright.infra import local
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.settings import Settings

    with console.err.status("stopping Airflow and the S3 server"):
        local.down(Settings.from_environment().home)
    _stack(as_json)


def _stack(as_json: bool) -> None:
    from trainwright.infra import local
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.settings import Settings

    services = local.status(Settings.from_environment().home)
    if as_json:
        print_json({"services": services})
        return
    rows = [(one["name"], one["state"], one.get("address") or "") for one in services]
    console.table("embedded stack", ("service", "state", "address"), rows)
    for one in services:
        if one.get("note"):
            console.out.print(f"  {one['name']}: {one['note']}", soft_wrap=True, markup=False)
        if one.get("page"):
            console.out.print(f"  trainwright's page: {one['page']}", soft_wrap=True, markup=False)
