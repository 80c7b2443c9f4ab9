"""`deadweight explain`: one law, or all of them."""

from __future__ import annotations

from typing import Annotated

import typer

from deadweight.cli.options import complete_law
from deadweight.laws.page import find_page
from deadweight.report.audit_terminal import make_console, print_laws, print_page


def explain(
    law: Annotated[
        str | None,
        typer.Argument(
            metavar="LAW",
            help="Its code or name; without it, all laws are listed.",
            autocompletion=complete_law,
        ),
    ] = None,
) -> None:
    """Show one law: what it says, why it is true, an example, when it fails, how safe it is.

    \b
    deadweight explain              all laws, one line each
    deadweight explain DW002        one law by its code
    deadweight explain key-bias     the same law by its name
    """
    console = make_console()
    if law is None:
        print_laws(console)
    else:
        print_page(find_page(law), console)
