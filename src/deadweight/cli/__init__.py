"""The `deadweight` command. Each subcommand has a file, calls one function of the library, and shows the result."""

from deadweight.cli.main import app, main

__all__ = ["app", "main"]
