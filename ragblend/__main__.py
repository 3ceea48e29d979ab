"""`python -m ragblend` is the command line."""

from ragblend.cli.app import main

main()
