"""Before a release: what would be published is built, looked at and installed (`python -m tools.release`)."""
