"""The command line: one file a command; each parses, makes one call, and formats what came back."""

from unisono.cli.app import main

__all__ = ["main"]
