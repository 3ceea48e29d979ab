"""`python -m ragblend` is the command line."""

from ragblend.cli import main

main()
