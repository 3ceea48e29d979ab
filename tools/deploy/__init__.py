"""Tools that check what is in deploy/, and are no Python packages: helm, promtool, schemas of Kubernetes objects."""
