"""`python -m unisono` is `unisono`."""

from unisono.cli.app import main

main()
