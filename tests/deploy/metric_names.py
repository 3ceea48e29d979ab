"""Which queries a dashboard and alert rules ask, and which metrics of vLLM's those name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

_GRAFANA = {"$__rate_interval": "5m", "$namespace": "rag", "$model": "m"}


def expressions(path: Path) -> list[str]:
    """The queries of a dashboard (JSON), with its variables filled in, or of a file of rules (YAML)."""
    if path.suffix == ".yaml":
        return [rule["expr"] for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    panels: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name, value in _GRAFANA.items():
        found = [query.replace(name, value) for query in found]
    return found


def metrics_in(queries: Iterable[str]) -> set[str]:
    """Names of vLLM's and ragblend's metrics."""
    return {name for query in queries for name in re.findall(r"\bvllm:\w+", query)}
