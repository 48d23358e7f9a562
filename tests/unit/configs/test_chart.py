"""The Helm chart: what it renders fits the program it starts, and values of the wrong type are refused by name."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from integration.kubernetes import helm
from pyshim.model.places import METRICS_DIRECTORY, REGISTER, STATE_ROOT
from pyshim.model.sizing import PLACEMENT_SOCKET
from pyshim.node.cli import dra, monitor, node_agent, nri, webhook
from pyshim.node.cli.command import run
from pyshim.node.dra.slices import DRIVER
from pyshim.node.install.handlers import HANDLERS
from pyshim.node.install.in_cluster.plan import handler_label
from pyshim.resources.devices.plan.instances import read_instances

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
DOCS = CONFIGS.parent / "docs"
POLICY = "NetworkPolicy"
INSTANCES = CONFIGS.parent / "tests" / "fuzz" / "corpus" / "instance-types" / "table.toml"
VALUES = yaml.safe_load((helm.CHART / "values.yaml").read_text())
SCHEMA = json.loads((helm.CHART / "values.schema.json").read_text())
ALL = [
    *(f"--set=classes.{handler.name}.enabled=true" for handler in HANDLERS),
    *("--set=webhook.enabled=true", "--set=monitor.enabled=true", "--set=nri.enabled=true"),
    "--set=image.pullSecrets={one,two}",
    *("--set=dra.enabled=true", f"--set-file=dra.instances={INSTANCES}"),
    *("--set=monitor.podMonitor.enabled=true", "--set=monitor.rules.enabled=true", "--set=nodeFeatureRules=true"),
    *("--set=monitor.rules.labels.release=prometheus", "--set=labels.team=nodes"),
]
SETS: dict[str, list[str]] = {
    "default": [],
    "all": ALL,
    "own": [
        *("--set=image.digest=sha256:" + "a" * 64, "--set=node.startupTaint=", "--set=node.ownNodeOnly=false"),
        *("--set=node.kind=k3s", "--set=node.socket=/run/a.sock", "--set=node.containerdConfig=/etc/c.toml"),
        *("--set=monitor.enabled=true", "--set=networkPolicies=false", "--set=node.maxUnavailable=10%"),
        *("--set=webhook.enabled=true", "--set=webhook.options={--node-cpus,64}"),
        *("--set=nri.enabled=true", "--set-string=nri.reservedCpus=0-1\\,16", "--set=nri.socket=/run/crio/nri/n.sock"),
        "--set-file=classes.pykata.dropIn=" + str(CONFIGS / "configuration-qemu.toml"),
        *("--set=webhook.certManager.enabled=true", "--set=webhook.replicas=1"),
        *("--set=classes.far.base=pykata-remote", "--set=classes.far.overhead.memory=25Mi"),
        *("--set=classes.gpu.base=pykata-tdx", "--set=classes.gpu.overhead.memory=2Gi"),
        "--set-string=classes.gpu.dropIn=[hypervisor.qemu]",
    ],
    "debug-only": ["--set=classes.pykata.enabled=false", "--set=classes.pykata-debug.enabled=true"],
}


@pytest.fixture(scope="module")
def program() -> str:
    found = helm.find()
    if found is None:
        pytest.skip("helm is not here (hint: .venv/bin/python -m integration.kubernetes.helm builds it)")
    return found


def rendered(program: str, *words: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(helm.template(program, *words)) if each]


def of(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def containers(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        container
        for each in objects
        if each["kind"] in ("DaemonSet", "Deployment", "Job")
        for container in each["spec"]["template"]["spec"]["containers"]
    ]


def test_the_chart_has_a_class_for_each_handler_with_the_overhead_that_podfixed_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(VALUES["classes"]) == list(SCHEMA["properties"]["classes"]["properties"])
    assert set(VALUES["classes"]) == {handler.name for handler in HANDLERS}
    for handler in HANDLERS:
        reserve = "82" if handler.source == "configuration-qemu.toml" else "0"
        words = ["--config", str(CONFIGS / handler.source), "--node-kvm", "yes", "--reserve", reserve]
        more = ["--state-dir", str(tmp_path), "--runtimeclass", handler.name, "--json"]
        assert run(["sizing", "podfixed", *words, *more]) == 0
        computed = json.loads(capsys.readouterr().out)["overhead"]["podFixed"]
        assert VALUES["classes"][handler.name]["overhead"] == computed, handler.name


def test_every_value_has_a_type() -> None:
    def untyped(values: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
        schema = SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
        if "properties" not in schema:
            return [] if schema.keys() & {"type", "enum", "anyOf"} else [path]
        if schema.get("additionalProperties", True) is True:
            return [path]
        return [
            found
            for name, value in values.items()
            for found in (
                untyped(value if isinstance(value, dict) else {}, schema["properties"][name], f"{path}.{name}")
                if name in schema["properties"]
                else [f"{path}.{name}"]
            )
        ]

    assert untyped(VALUES, SCHEMA, "") == []


@pytest.mark.parametrize("name", list(SETS))
def test_helm_finds_nothing_wrong(program: str, name: str) -> None:
    words = [program, "lint", "--strict", str(helm.CHART), "--set=image.repository=registry.test/pyshim", *SETS[name]]

    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("--set=image.repository=", "repository"),
        ("--set=image.pullPolicy=Sometimes", "pullPolicy"),
        ("--set=image.digest=latest", "digest"),
        ("--set=classes.pykata.enabled=perhaps", "enabled"),
        ("--set=classes.pykata.overhead.cpu=1", "cpu"),
        ("--set=classes.pykata.overhead.memory=many", "memory"),
        ("--set=classes.gpu.base=runc", "base"),
        ("--set=classes.gpu.base=pykata", "overhead"),
        ('--set-json=classes.GPU={"base": "pykata", "overhead": {"memory": "1Mi"}}', "GPU"),
        ('--set-json=classes.state={"base": "pykata", "overhead": {"memory": "1Mi"}}', "state"),
        ("--set=node.maxUnavailable=0", "maxUnavailable"),
        ("--set=node.maxUnavailable=most", "maxUnavailable"),
        ("--set=node.tolerations=all", "tolerations"),
        ("--set=node.socket=containerd.sock", "socket"),
        ("--set=node.kind=docker", "kind"),
        ("--set=node.startupTaint=7", "startupTaint"),
        ("--set=webhook.failurePolicy=fail", "failurePolicy"),
        ("--set=webhook.certificateDays=100000", "certificateDays"),
        ("--set=nri.socket=/nri.sock", "socket"),
        ("--set=dra.enabled=true", "instances"),
        ("--set=dra.kubeletRoot=kubelet", "kubeletRoot"),
        ("--set-string=nri.reservedCpus=all", "reservedCpus"),
        ("--set=monitor.port=http", "port"),
        ("--set=monitor.podMonitor.interval=often", "interval"),
        ("--set=labels.team=7", "team"),
        ("--set=monitor.podAnnotations.a=1", "podAnnotations"),
        ("--set=mointor.enabled=true", "mointor"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(program: str, word: str, named: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        helm.template(program, word)

    assert named in caught.value.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set=classes.pykata.enabled=false"], "no runtime class is enabled"),
        (["--set=classes.gpu.overhead.memory=1Mi"], "classes.gpu: a class of your own needs the base it starts from"),
        (["--set=monitor.podMonitor.enabled=true"], "there is no monitor to scrape"),
        (["--set=classes.pykata.base=pykata-tdx"], "classes.pykata: it comes with pyshim and has no base"),
        (
            [
                *("--set=webhook.enabled=true", "--set=classes.pykata.enabled=false"),
                "--set=classes.pykata-remote.enabled=true",
            ],
            "no class with VMs on nodes is enabled",
        ),
        (
            [
                *("--set=nri.enabled=true", "--set=classes.pykata.enabled=false"),
                "--set=classes.pykata-remote.enabled=true",
            ],
            "nri.enabled: no class with VMs on nodes is enabled",
        ),
    ],
)
def test_values_that_make_no_sense_together_are_refused(program: str, words: list[str], said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        helm.template(program, *words)

    assert said in caught.value.stderr


@pytest.mark.parametrize("name", list(SETS))
def test_the_programs_take_the_words_that_the_chart_gives_them(program: str, name: str) -> None:
    commands: dict[tuple[str, ...], click.Command] = {
        ("node-agent", "run"): node_agent.run,
        ("node-agent", "wait-removed"): node_agent.wait_removed,
        ("webhook", "serve"): webhook.serve,
        ("nri", "run"): nri.run,
        ("monitor",): monitor.monitor_command,
        ("dra", "run"): dra.run,
        ("dra", "withdraw"): dra.withdraw,
    }
    found = containers(rendered(program, *SETS[name]))

    for container in found:
        (verb,) = (each for each in commands if tuple(container["args"][: len(each)]) == each)
        words = [*container["args"][len(verb) :], *(["--node=n"] if verb == ("node-agent", "run") else [])]
        commands[verb].make_context(shlex.join(verb), words)
    assert len(found) == 2 + 3 * (name in ("all", "own")) + 2 * (name == "all")


def test_a_class_goes_to_nodes_whose_test_pod_ran(program: str) -> None:
    objects = rendered(program, *ALL, "--set=classes.pykata-tdx.nodeSelector.pool=tdx")

    for handler in HANDLERS:
        found = of(objects, "RuntimeClass", handler.name)
        assert found["handler"] == handler.name
        assert found["overhead"]["podFixed"] == VALUES["classes"][handler.name]["overhead"]
        more = {"pool": "tdx"} if handler.name == "pykata-tdx" else {}
        assert found["scheduling"]["nodeSelector"] == {handler_label(handler.name): "true", **more}
    (node,) = (each for each in containers(objects) if each["name"] == "node")
    assert [word for word in node["args"] if word.startswith("--handler")] == [f"--handler={h.name}" for h in HANDLERS]


def test_a_class_of_ones_own_is_the_same_on_nodes_in_the_webhook_and_in_the_plugin(program: str) -> None:
    objects = rendered(program, *SETS["own"])

    settings = of(objects, "ConfigMap", "pyshim-classes")["data"]
    assert settings.keys() == {"pykata.toml", "gpu.toml"}
    arguments = {each["name"]: each["args"] for each in containers(objects)}
    assert [word for word in arguments["node"] if word.startswith("--handler")] == [
        "--handler=pykata=/etc/pyshim-classes/pykata.toml",
        "--handler=far:pykata-remote",
        "--handler=gpu:pykata-tdx=/etc/pyshim-classes/gpu.toml",
    ]
    at = "/etc/pyshim/webhook/classes"
    assert [word for word in arguments["webhook"] if word.startswith(("--class", "--drop-in"))] == [
        "--class=pykata=/opt/pyshim-image/configs/configuration-qemu.toml",
        f"--drop-in=pykata={at}/pykata.toml",
        "--class=gpu=/opt/pyshim-image/configs/configuration-qemu-tdx.toml",
        f"--drop-in=gpu={at}/gpu.toml",
    ]
    assert [word for word in arguments["nri"] if word.startswith("--handler")] == ["--handler=pykata", "--handler=gpu"]
    gpu = of(objects, "RuntimeClass", "gpu")
    assert (gpu["handler"], gpu["overhead"]) == ("gpu", {"podFixed": {"memory": "2Gi"}})
    assert gpu["scheduling"]["nodeSelector"] == {handler_label("gpu"): "true"}


def test_changed_settings_are_rolled_out(program: str) -> None:
    def templates(text: str) -> list[dict[str, Any]]:
        objects = rendered(program, "--set=webhook.enabled=true", f"--set-string=classes.pykata.dropIn={text}")
        kinds = (("DaemonSet", "pyshim-node"), ("Deployment", "pyshim-webhook"))
        return [of(objects, kind, name)["spec"]["template"]["metadata"] for kind, name in kinds]

    for before, after in zip(templates("[runtime]"), templates("[hypervisor.qemu]"), strict=True):
        assert before != after


def test_alerts_use_metrics_that_are_served_and_labels_that_they_have(program: str) -> None:
    (spec,) = (each["spec"] for each in rendered(program, *ALL) if each["kind"] == "PrometheusRule")
    documented = "".join((DOCS / name).read_text() for name in ("METRICS.md", "WEBHOOK.md"))

    rules = {rule["alert"]: rule for group in spec["groups"] for rule in group["rules"]}
    assert len(rules) == 4
    for name, rule in rules.items():
        metrics = set(re.findall(r"pyshim_\w+", rule["expr"]))
        assert metrics
        assert all(f"`{metric}`" in documented for metric in metrics), name
        of_text = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert of_text <= {"sandbox_id", "cri_namespace", "cri_name"}, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (Debian's package prometheus)")
def test_promtool_accepts_the_alerts() -> None:
    words = ["promtool", "check", "rules", str(helm.CHART / "files" / "alerts.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 rules found" in done.stdout


def test_scrapers_find_the_ports_that_the_programs_serve(program: str) -> None:
    objects = rendered(program, *ALL)
    ports = {
        each["metadata"]["name"]: {port["name"] for port in container["ports"]}
        for each in objects
        if each["metadata"]["name"] in ("pyshim-monitor", "pyshim-webhook")
        and each["kind"] in ("DaemonSet", "Deployment")
        for container in each["spec"]["template"]["spec"]["containers"]
    }

    (pods,) = of(objects, "PodMonitor", "pyshim-monitor")["spec"]["podMetricsEndpoints"]
    (service,) = of(objects, "ServiceMonitor", "pyshim-webhook")["spec"]["endpoints"]
    assert ports == {"pyshim-monitor": {pods["port"]}, "pyshim-webhook": {service["port"]}}
    assert service["tlsConfig"]["serverName"] == "pyshim-webhook.default.svc"


def test_with_cert_manager_the_release_makes_no_certificate_and_renders_the_same_twice(program: str) -> None:
    words = ("--set=webhook.enabled=true", "--set=webhook.certManager.enabled=true")
    objects = rendered(program, *words)

    assert objects == rendered(program, *words)
    assert not [each for each in objects if each["kind"] == "Secret"]
    spec = of(objects, "Certificate", "pyshim-webhook")["spec"]
    assert spec["issuerRef"] == {"kind": "Issuer", "name": of(objects, "Issuer", "pyshim-webhook")["metadata"]["name"]}
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        calls = of(objects, kind, "pyshim-webhook")
        assert calls["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "default/pyshim-webhook"}
        assert "caBundle" not in calls["webhooks"][0]["clientConfig"]


def test_labels_of_the_operator_are_on_every_object(program: str) -> None:
    assert {each["metadata"]["labels"]["team"] for each in rendered(program, *ALL)} == {"nodes"}


def test_the_test_pod_runs_in_the_first_class(program: str) -> None:
    spec = of(rendered(program, *SETS["debug-only"]), "Pod", "pyshim-test")["spec"]

    assert spec["runtimeClassName"] == "pykata-debug"


def test_accounts_may_do_what_their_pods_do_and_no_more(program: str) -> None:
    objects = rendered(program, *ALL)

    rules = {each["metadata"]["name"]: each["rules"] for each in objects if each["kind"] == "ClusterRole"}
    assert rules == {
        "pyshim-node": [
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
            {
                "apiGroups": ["node.k8s.io"],
                "resources": ["runtimeclasses"],
                "resourceNames": [handler.name for handler in HANDLERS],
                "verbs": ["get"],
            },
        ],
        "pyshim-remove": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}],
        "pyshim-dra": [
            {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
            {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list", "create", "delete"]},
        ],
    }
    assert not [each for each in objects if each["kind"] in ("Role", "RoleBinding")]
    privileged = [each["name"] for each in containers(objects) if each["securityContext"].get("privileged")]
    assert privileged == ["node"]
    for each in containers(objects):
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
    for kind, name in (("Deployment", "pyshim-webhook"), ("DaemonSet", "pyshim-monitor"), ("DaemonSet", "pyshim-nri")):
        assert of(objects, kind, name)["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_monitor_gets_the_sockets_that_only_answer_questions_and_no_other(program: str) -> None:
    spec = of(rendered(program, *ALL), "DaemonSet", "pyshim-monitor")["spec"]["template"]["spec"]

    assert [volume["hostPath"]["path"] for volume in spec["volumes"]] == [METRICS_DIRECTORY]


def test_network_policies_let_in_what_the_programs_serve_and_nothing_out(program: str) -> None:
    specs = {each["metadata"]["name"]: each["spec"] for each in rendered(program, *ALL) if each["kind"] == POLICY}

    assert {name: [rule["ports"] for rule in spec["ingress"]] for name, spec in specs.items()} == {
        "pyshim-webhook": [[{"port": "https"}]],
        "pyshim-monitor": [[{"port": "metrics"}]],
        "pyshim-nri": [],
    }
    for name, spec in specs.items():
        assert spec["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": name}}
        assert (spec["policyTypes"], spec["egress"]) == (["Ingress", "Egress"], [])
    assert POLICY not in {each["kind"] for each in rendered(program, *SETS["own"])}


def test_the_plugin_sees_shims_and_the_sockets_that_the_runtime_and_they_use(program: str) -> None:
    spec = of(rendered(program, *SETS["own"]), "DaemonSet", "pyshim-nri")["spec"]["template"]["spec"]
    (container,) = spec["containers"]

    shared = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert shared == mounted
    states = {STATE_ROOT, REGISTER}  # and no directory of VMs, with the sockets of QEMU and its servers
    assert set(shared.values()) == {"/run/crio/nri", os.path.dirname(PLACEMENT_SOCKET), *states}
    assert {mount["name"] for mount in container["volumeMounts"] if mount.get("readOnly")} == {"register", "sandboxes"}
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-S", PLACEMENT_SOCKET]
    assert spec["hostPID"] is True
    own = ["--handler=pykata", "--handler=gpu"]
    assert container["args"][2:] == ["--socket=/run/crio/nri/n.sock", "--reserved=0-1,16", *own]


def test_the_dra_driver_offers_the_table_and_leaves_it_to_the_shims(program: str) -> None:
    objects = rendered(program, *ALL)
    spec = of(objects, "DaemonSet", "pyshim-dra")["spec"]["template"]["spec"]
    (container,) = spec["containers"]

    assert read_instances(of(objects, "ConfigMap", "pyshim-instances")["data"]["instances.toml"].encode(), "").type
    shared = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert shared.items() <= mounted.items()
    at = "/var/lib/kubelet"
    assert set(shared.values()) == {
        *(f"{at}/plugins_registry", f"{at}/plugins/{DRIVER}", "/var/run/cdi", "/run/pyshim/dra")
    }
    assert of(objects, "DeviceClass", DRIVER)["spec"]["selectors"] == [
        {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
    ]


def test_one_reserved_cpu_is_a_number_to_helm_and_options_are_the_plugins(program: str) -> None:
    words = ("--set=nri.enabled=true,nri.reservedCpus=0", "--set=nri.options={--rdt-class=shared=gold}")
    spec = of(rendered(program, *words), "DaemonSet", "pyshim-nri")

    arguments = spec["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[3:] == ["--reserved=0", "--handler=pykata", "--rdt-class=shared=gold"]


def test_options_with_numbers_are_the_webhooks_words(program: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("webhook: {enabled: true, options: [--node-cpus, 64, --node-memory, 4194304]}")
    made = of(rendered(program, f"--values={values}"), "Deployment", "pyshim-webhook")

    arguments = made["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[-4:] == ["--node-cpus", "64", "--node-memory", "4194304"]


def test_a_webhook_on_a_host_is_called_as_the_charts(program: str) -> None:
    objects = rendered(program, "--set=webhook.enabled=true")
    on_a_host = list(yaml.safe_load_all((CONFIGS / "kubernetes/webhook-on-a-host.yaml").read_text()))

    for each in on_a_host:
        of_chart, of_host = (
            {hook["name"]: hook for hook in made["webhooks"]}
            for made in (of(objects, each["kind"], "pyshim-webhook"), each)
        )
        for name, hook in of_chart.items():
            path = hook.pop("clientConfig")["service"]["path"]
            assert of_host[name].pop("clientConfig") == {"url": f"https://HOST:8443{path}", "caBundle": "CA_BUNDLE"}
        assert of_chart == of_host
    assert len(on_a_host) == 2
