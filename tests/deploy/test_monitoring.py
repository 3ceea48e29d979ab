"""The alert rules and the dashboard, as promtool and Grafana read them. tests/inside_vllm looks their metrics up."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import yaml
from charts import CHART, EVERYTHING, rendered, the, tool
from metric_names import expressions, metrics_in

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operators.md"
MONITORING = CHART / "monitoring"
RULES, DASHBOARD = MONITORING / "rules.yaml", MONITORING / "dashboard.json"


def promtool(*words: str | Path) -> str:
    done = subprocess.run([tool("promtool"), *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules():
    num_rules = len(yaml.safe_load(RULES.read_text())["groups"][0]["rules"])
    assert f"SUCCESS: {num_rules} rules found" in promtool("check", "rules", RULES)


def test_alerts_fire_on_what_they_are_for_and_on_nothing_else():
    assert "SUCCESS" in promtool("test", "rules", MONITORING / "rules_test.yaml")


def test_every_alert_is_tested_both_ways():
    names = {rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
    tests = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_prometheus_reads_every_query_of_the_dashboard(tmp_path):
    queries = expressions(DASHBOARD)
    assert len(queries) >= 20
    rules = [{"record": f"panel:query{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", tmp_path / "queries.yaml")


def test_the_dashboard_s_panels_do_not_overlap_and_have_their_own_ids():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_chart_hands_on_rules_and_dashboard_as_they_are():
    objects = rendered(values=EVERYTHING)
    assert the("PrometheusRule", objects)["spec"] == yaml.safe_load(RULES.read_text())
    assert the("ConfigMap", objects)["data"]["ragblend.json"] == DASHBOARD.read_text()


def test_the_operators_page_has_a_row_for_each_alert():
    names = sorted(rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"])
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| Ragblend")]
    assert sorted(row[1].strip() for row in rows) == names
    assert all(len(row) == 6 and all(cell.strip() for cell in row[1:-1]) for row in rows)


def test_alerts_fired_and_cleared_unless_their_row_says_not_provoked():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| Ragblend")]
    provoked = {row.split("|")[1].strip() for row in rows if "Not provoked" not in row}
    tried = json.loads((ROOT / "data/results/alerts.json").read_text())["alerts"]
    assert {name for name, found in tried.items() if {"fired_s", "cleared_s"} <= found.keys()} == provoked


def test_the_metrics_of_the_operators_page_exist():
    """Those of ragblend are in its source, vLLM's in the rules or the dashboard; tests/inside_vllm asks a server."""
    sources = ("engine/vllm/metrics.py", "server/document_metrics.py")
    text = "".join((ROOT / "ragblend" / name).read_text() for name in sources)
    known = {f"vllm:ragblend_{name}" for name in re.findall(r'(?:^    |gauge\()"(\w+)"[:,]', text, re.MULTILINE)}
    known |= metrics_in([*expressions(RULES), *expressions(DASHBOARD)])
    named = metrics_in([PAGE.read_text()])
    assert len(named) > 20
    assert {name for name in named if {name, re.sub(r"_(total|bucket)$", "", name)}.isdisjoint(known)} == set()
