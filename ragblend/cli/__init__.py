"""The command line: a file per group of commands; `app` puts them together."""
