"""deploy/helm/ragblend as helm renders it: objects that Kubernetes takes, commands that ragblend takes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from charts import CHART, DEPLOY, EVERYTHING, NAMESPACE, RELEASE, container, helm, rendered, the
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from ragblend.cli.app import app
from ragblend.config import Settings
from ragblend.engine.store.format.signing import KEY_VARIABLE
from ragblend.server import readiness
from ragblend.server.api_keys import read_keys
from tools.deploy.fetch import FOLDER, KUBERNETES

VALUES = {"defaults": None, "everything on": EVERYTHING}
CUSTOM = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}  # not Kubernetes' own


@pytest.fixture(scope="module", params=list(VALUES))
def objects(request):
    return rendered(values=VALUES[request.param])


@pytest.fixture(scope="module")
def everything():
    return rendered(values=EVERYTHING)


def parsed(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What the command line's own parser makes of `ragblend serve ARGS`, and what goes to vLLM."""
    group: Any = typer.main.get_command(app)
    context = group.commands["serve"].make_context("serve", list(args))
    return context.params, context.args


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
def test_helm_lints_the_chart(values):
    done = helm("lint", "--strict", CHART, *(["-f", values] if values else []))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object(objects, version):
    folder = FOLDER / "kubernetes" / f"v{version}.0-local-strict"
    if not folder.is_dir():
        pytest.skip("no schemas of Kubernetes objects; get them with: make deploy-check")
    definitions = Resource(json.loads((folder / "_definitions.json").read_text()), DRAFT202012)
    registry: Any = Registry().with_resource("/api/_definitions.json", definitions)
    num_checked = 0
    for each in objects:
        if each["kind"] not in CUSTOM:
            group, _, api = each["apiVersion"].rpartition("/")
            name = "-".join(filter(None, [each["kind"].lower(), group.split(".")[0], api]))
            schema = json.loads((folder / f"{name}.json").read_text())
            jsonschema.Draft202012Validator(schema, registry=registry).validate(each)
            num_checked += 1
    assert num_checked >= 5


def test_everything_on_renders_every_kind_of_object(everything):
    kinds = {each["kind"] for each in everything}
    assert kinds >= CUSTOM | {"NetworkPolicy", "PersistentVolumeClaim", "ConfigMap", "Deployment", "RoleBinding"}
    names = [(each["kind"], each["metadata"]["name"]) for each in everything]
    assert len(names) == len(set(names))


def test_ragblend_takes_the_default_command():
    own, vllm = parsed(container(rendered())["args"])
    assert (own["model"], own["host"], own["port"]) == ("Qwen/Qwen3-8B", "0.0.0.0", 8000)
    assert vllm == ["--shutdown-timeout=120"]


def test_ragblend_takes_the_command_with_every_switch_on(everything):
    own, vllm = parsed(container(everything)["args"])
    assert own["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert (str(own["recompute_ratio"]), own["rule"], own["context"]) == ("0.2", "cacheblend_k", "none")
    assert (own["system"], own["mode"]) == ("You answer briefly, from the documents.", "prefix")
    flags = ["--shutdown-timeout=120", "--tensor-parallel-size=2", "--max-model-len", "16384", "--max-num-seqs=64"]
    assert vllm == flags


def test_ragblend_knows_every_variable_that_it_is_given(everything):
    known = {f"RAGBLEND_{name.upper()}" for name in Settings.__dataclass_fields__}
    known |= {"RAGBLEND_API_KEY", KEY_VARIABLE}
    for objects in (rendered("remote.url=redis://cache:6379/0"), everything):
        names = [each["name"] for each in container(objects)["env"]]
        assert len(names) == len(set(names))
        given = {name for name in names if name.startswith("RAGBLEND_")}
        assert given <= known
        assert {"RAGBLEND_STORE", "RAGBLEND_REMOTE", "RAGBLEND_DISK_GIB"} <= given


def test_a_volume_of_several_nodes_needs_a_catalogue_in_a_database():
    done = helm("template", RELEASE, CHART, "--set", "store.kind=shared")
    assert done.returncode != 0
    assert "store.kind=shared needs catalog.secret" in done.stderr
    assert container(rendered("store.kind=shared", "catalog.secret.secretName=postgres"))


def test_no_secret_is_in_a_release(everything):
    environment = {each["name"]: each for each in container(everything)["env"]}
    for name in ("RAGBLEND_API_KEY", "RAGBLEND_REMOTE", "RAGBLEND_CATALOG", KEY_VARIABLE, "HF_TOKEN"):
        assert environment[name]["valueFrom"]["secretKeyRef"]["name"]
    assert not [each for each in everything if each["kind"] == "Secret"]


def test_the_image_s_folders_are_those_of_the_pod(objects):
    server = container(objects)
    pod = the("StatefulSet", objects)["spec"]["template"]["spec"]
    templates = the("StatefulSet", objects)["spec"].get("volumeClaimTemplates", [])
    volumes = [each["name"] for each in pod["volumes"]] + [each["metadata"]["name"] for each in templates]
    assert sorted(volumes) == sorted(each["name"] for each in server["volumeMounts"])
    written = {each["mountPath"] for each in server["volumeMounts"]}
    environment = {each["name"]: each.get("value", "") for each in server["env"]}
    for name in ("RAGBLEND_STORE", "HOME", "HF_HOME", "XDG_CACHE_HOME"):  # the rest of the file system is read-only
        assert any(environment[name].startswith(path) for path in written), name
        assert f"{name}={environment[name]}" in (DEPLOY / "Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}:" in (DEPLOY / "Dockerfile").read_text()
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert json.dumps([*server["command"]]) in (DEPLOY / "Dockerfile").read_text()


def test_a_pod_has_a_readiness_probe_and_time_to_drain(objects):
    server = container(objects)
    assert server["readinessProbe"]["httpGet"]["path"] == readiness.PATH
    pod = the("StatefulSet", objects)["spec"]["template"]["spec"]
    slept = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    (flag,) = [word for word in server["args"] if word.startswith("--shutdown-timeout=")]
    assert pod["terminationGracePeriodSeconds"] >= slept + int(flag.partition("=")[2]) + 30
    assert slept >= 2 * server["readinessProbe"]["periodSeconds"]


def test_what_selects_pods_selects_the_servers(objects):
    labels = the("StatefulSet", objects)["spec"]["template"]["metadata"]["labels"].items()
    service = the("Service", objects, "answers-ragblend")
    selectors = [
        the("StatefulSet", objects)["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        the("Service", objects, "-replicas")["spec"]["selector"],
        the("PodDisruptionBudget", objects)["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    replicas = the("Service", objects, "-replicas")["metadata"]["name"]
    assert the("StatefulSet", objects)["spec"]["serviceName"] == replicas
    if router := [each for each in objects if each["kind"] == "Deployment"]:
        others = router[0]["spec"]["template"]["metadata"]["labels"]
        assert not any(selector.items() <= others.items() for selector in selectors)
        monitored = the("ServiceMonitor", objects)["spec"]["selector"]["matchLabels"].items()
        assert monitored <= service["metadata"]["labels"].items()
        assert not monitored <= the("Service", objects, "-router")["metadata"]["labels"].items()


def test_replicas_follow_the_queue_of_this_release(everything):
    scaled, server = the("ScaledObject", everything)["spec"], the("StatefulSet", everything)
    assert scaled["scaleTargetRef"]["name"] == server["metadata"]["name"]
    assert "replicas" not in server["spec"]  # helm upgrade would undo what KEDA chose
    (trigger,) = scaled["triggers"]
    service = the("Service", everything, "answers-ragblend")["metadata"]["name"]
    labels = f'{{namespace="{NAMESPACE}",service="{service}"}}'
    assert trigger["metadata"]["query"] == f"sum(vllm:num_requests_waiting{labels})"


def test_the_router_is_given_flags_that_it_has(everything):
    if not (FOLDER / "vllm_router").is_dir():
        pytest.skip("no vllm-router; get its flags with: make deploy-check")
    sys.path.append(str(FOLDER))
    try:
        from vllm_router.router_args import RouterArgs
    finally:
        sys.path.remove(str(FOLDER))
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    given = parser.parse_args(container(everything, "Deployment")["args"])
    assert given.service_discovery
    assert given.policy == "consistent_hash"
    found = dict(each.split("=") for each in given.selector)
    labels = the("StatefulSet", everything)["spec"]["template"]["metadata"]["labels"]
    assert found.items() <= labels.items()
    assert given.health_check_endpoint == readiness.PATH
    version = re.search(r"vllm-router==(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert f"vllm-router=={version[1]}" in (CHART.parents[2] / "tools" / "deploy" / "fetch.py").read_text()


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replica=3", "replica"),
        ("blend.ratio=1.5", "ratio"),
        ("store.kind=redis", "kind"),
        ("remote.url=cache:6379", "url"),
        ("vllmArgs={--port=9000}", "vllmArgs"),
        ("model=", "model"),
        ("drain.timeoutS=0", "timeoutS"),
        ("remote.url=redis://a:1/0,remote.secret.secretName=redis", "choose one"),
        ("apiKey.secretName=one,keysFile.secretName=many", "choose keysFile"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(setting, named):
    done = helm("template", "x", CHART, "--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


def test_the_keys_file_is_mounted_for_its_group_and_passed_on(tmp_path):
    objects = rendered("keysFile.secretName=tenants", "keysFile.key=tenants.toml")
    server = container(objects)
    (variable,) = [each for each in server["env"] if each["name"] == "RAGBLEND_API_KEYS_FILE"]
    (mount,) = [each for each in server["volumeMounts"] if each["name"] == "keys"]
    volumes = the("StatefulSet", objects)["spec"]["template"]["spec"]["volumes"]
    (secret,) = [each["secret"] for each in volumes if each["name"] == "keys"]
    assert variable["value"] == f"{mount['mountPath']}/{secret['items'][0]['path']}"
    assert (secret["secretName"], secret["items"][0]["key"], mount["readOnly"]) == ("tenants", "tenants.toml", True)
    # As the kubelet writes it: a link to a file of that mode.
    (tmp_path / "data").write_text(
        'open = ["/health", "/ragblend/ready"]\n[keys.sk-of-acme]\nnamespace = "acme"\nrights = ["ask"]\n'
    )
    (tmp_path / "data").chmod(secret["defaultMode"])
    (tmp_path / "keys").symlink_to(tmp_path / "data")
    keys = read_keys(tmp_path / "keys")
    probes = {server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == set(keys.open_paths)


def test_who_scrapes_shows_a_key_where_one_is_named():
    settings = ("monitoring.serviceMonitor.enabled=true", "monitoring.serviceMonitor.apiKey.secretName=scraper")
    (endpoint,) = the("ServiceMonitor", rendered(*settings))["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "scraper", "key": "api-key"}
    (open_one,) = the("ServiceMonitor", rendered(settings[0]))["spec"]["endpoints"]
    assert set(open_one) == {"port", "path", "interval"}


def test_every_value_is_described_by_the_schema():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    for path in (CHART / "values.yaml", EVERYTHING):
        jsonschema.Draft7Validator(schema).validate(yaml.safe_load(path.read_text()))
    assert set(schema["properties"]) - {"global"} == set(yaml.safe_load((CHART / "values.yaml").read_text()))
