"""The files in deploy/ parse, and type what `atoll` takes. Nothing of them is run in a container here."""

import importlib.util
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path

import pytest

from tests.deployed import DEPLOY, coordinator_in, documents
from tests.unit.test_docs import check_command_line

WITHOUT_SCHEMAS = "the schemas come with pip install -c constraints.txt '.[dev]'"
FILES = sorted(path for path in DEPLOY.iterdir() if path.is_file())


def command_lines(text: str) -> list[str]:
    """What a shell would type of `atoll`, with its variables filled in by a word."""
    joined = re.sub(r"\\\n", " ", text)
    found = re.findall(r"(?:^|[|&{;]|exec|--|')\s*\b(atoll (?:[a-z].*))$", joined, flags=re.M)
    lines = []
    for line in found:
        line = re.split(r" > |\s+#|\|\||;|'\.?$", line)[0]
        line = re.sub(r"\$\(\([^)]*\) ?\*? ?\d*\)+|\$\((?:[^()]|\([^()]*\))*\)", "8", line)
        lines.append(re.sub(r"\$?\$\w+", "8", line).strip())
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_command_line_is_one_that_atoll_takes(path: Path) -> None:
    lines = command_lines(path.read_text())
    for line in lines:
        check_command_line(line)
    if path.name not in ("Dockerfile", "healthy.py"):
        assert len(lines) >= 2, "else they are no longer recognised"


def test_a_command_line_with_a_mistake_would_be_found() -> None:
    (line,) = command_lines("  test -f x || atoll node start --fast \\\n  --device cuda\n")
    assert line.split() == ["atoll", "node", "start", "--fast", "--device", "cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_was_never_run_says_so(path: Path) -> None:
    if path.name != "healthy.py":
        assert "Not run: no " in path.read_text()


def test_containers_answer_their_health_check_on_its_port() -> None:
    port = re.search(r"^PORT = (\d+)", (DEPLOY / "healthy.py").read_text(), re.M)
    assert port is not None
    starts = [
        line
        for path in FILES
        if path.name in ("compose.yaml", "kubernetes.yaml")
        for line in command_lines(path.read_text())
        if re.search(r"(node|coordinator) start", line)
    ]
    assert len(starts) == 4
    for line in starts:
        assert re.search(rf"--(metrics|dashboard) 127\.0\.0\.1:{port[1]}$", line), line


def test_nodes_get_time_to_leave_and_shared_memory() -> None:
    (compose,) = documents("compose.yaml")
    assert compose["services"]["node"]["stop_grace_period"] == "2m"
    assert "shm_size" in compose["services"]["node"]
    named = {
        (each["kind"], each["metadata"]["name"]): each for each in documents("kubernetes.yaml")
    }
    pod = named["StatefulSet", "atoll-node"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    budget = named["PodDisruptionBudget", "atoll-node"]["spec"]
    labels = named["StatefulSet", "atoll-node"]["spec"]["template"]["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1 and budget["selector"]["matchLabels"] == labels


def test_the_volume_that_makes_a_pod_the_same_node_stays_where_it_is_moved_or_scaled() -> None:
    for each in documents("kubernetes.yaml"):
        if each["kind"] != "StatefulSet":
            continue
        kept = each["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert kept == {"whenDeleted": "Retain", "whenScaled": "Retain"}
        pod = each["spec"]["template"]["spec"]
        claims = {claim["metadata"]["name"] for claim in each["spec"]["volumeClaimTemplates"]}
        (folder,) = (
            one["name"]
            for one in pod["containers"][0]["volumeMounts"]
            if one["mountPath"] == "/data"
        )
        assert folder in claims and folder not in {one["name"] for one in pod.get("volumes", ())}


def test_a_coordinators_ports_are_open_by_udp_as_well_which_holes_in_routers_take() -> None:
    both = {(port, protocol) for port in (7700, 7701) for protocol in ("TCP", "UDP")}
    named = {
        (each["kind"], each["metadata"]["name"]): each["spec"]
        for each in documents("kubernetes.yaml")
    }
    service = named["Service", "atoll-coordinator"]["ports"]
    assert {(each["port"], each["protocol"]) for each in service} == both
    assert len({each["name"] for each in service}) == len(service)
    pod = named["StatefulSet", "atoll-coordinator"]["template"]["spec"]["containers"][0]
    assert {(each["containerPort"], each["protocol"]) for each in pod["ports"]} == both
    told = re.findall(r'"(\d+):\1/(tcp|udp)"', (DEPLOY / "compose.yaml").read_text())
    assert {(int(port), protocol.upper()) for port, protocol in told} == both


def test_no_container_runs_as_root_but_what_hands_out_the_invite() -> None:
    instructions = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert "USER atoll" in instructions[instructions.index("FROM ${BASE}") :]
    (compose,) = documents("compose.yaml")
    assert [name for name, each in compose["services"].items() if "user" in each] == ["invite"]
    for each in documents("kubernetes.yaml"):
        if each["kind"] == "StatefulSet":
            assert each["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]


def test_what_a_node_compiles_stays_with_the_volume() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    volume, cache = (
        re.search(r"^VOLUME (.+)$", text, re.M),
        re.search(r"XDG_CACHE_HOME=(\S+)", text),
    )
    assert volume and cache and Path(cache[1]).is_relative_to(volume[1])


def test_quotes_let_the_shell_fill_in_what_the_image_is_built_with() -> None:
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        assert not re.search(r"'[^']*\$[^']*'", line), line


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
@pytest.mark.parametrize("wants", ["", "restore", "broken"])
def test_a_coordinator_copies_itself_and_comes_back_only_where_that_is_asked_for(
    tmp_path: Path, name: str, wants: str
) -> None:
    script, volumes = coordinator_in(name)
    assert volumes == {"/data", "/backups"}
    program = tmp_path / "atoll"
    program.write_text(
        '#!/bin/sh\necho "$@" >> said\n'
        'case "$2" in restore) test -z "$BROKEN" || exit 66 ;; esac\n'
        'case "$2" in init|restore) mkdir run; touch run/coordinator.toml ;; esac\n'
    )
    program.chmod(0o755)
    if wants:  # what compose would fill in
        script = script.replace('test -z ""', 'test -z "yes"')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BROKEN": "yes" * (wants == "broken")}
    environment |= {"ATOLL_RESTORE": "yes"} if wants else {}

    def said() -> list[str]:
        done = subprocess.run(
            ["sh", "-euc", script], cwd=tmp_path, env=environment, check=False, capture_output=True
        )
        assert (done.returncode == 0) == (wants != "broken"), done.stderr
        words = (tmp_path / "said").read_text().splitlines()
        (tmp_path / "said").unlink()
        return words

    first, *then = said()
    assert first.startswith(
        "coordinator restore /backups/run run" if wants else "coordinator init run "
    )
    if wants == "broken":  # and no new run in the place of the old one
        assert not then
        return
    start = "coordinator start run --backup /backups/run --dashboard 127.0.0.1:9101"
    assert then == [start]
    assert said() == [start]


def test_what_the_image_copies_is_there() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", (DEPLOY / "Dockerfile").read_text(), re.M):
        for name in line.split()[:-1]:
            assert (DEPLOY.parent / name).exists(), name


def test_the_compose_file_is_one_by_its_schema() -> None:
    pytest.importorskip("check_jsonschema", reason=WITHOUT_SCHEMAS)
    jsonschema = pytest.importorskip("jsonschema", reason=WITHOUT_SCHEMAS)
    place = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(place.read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    (compose,) = documents("compose.yaml")
    assert [error.message for error in validator.iter_errors(compose)] == []
    compose["services"]["node"]["stop_grace"] = "2m"
    assert not validator.is_valid(compose)


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_manifests_are_such_by_the_schemas_of_kubernetes(version: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason=WITHOUT_SCHEMAS)
    for each in documents("kubernetes.yaml"):
        kubernetes.validate(each, version, strict=True)
    each["spec"]["maxUnavailble"] = 1
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(each, version, strict=True)


def shells() -> Iterator[str]:
    for name in ("compose.yaml", "kubernetes.yaml", "skypilot.yaml"):
        for document in documents(name):
            yield from _strings(document)
    yield (DEPLOY / "slurm.sh").read_text()


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value:
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def test_a_shell_understands_every_script() -> None:
    scripts = list(shells())
    assert len(scripts) == 8
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


PROGRAMS = {
    "hostname": "echo 10.0.0.1",
    "srun": """
        while [ "$1" != bash ]; do shift; done
        SLURM_PROCID=0 "$@"
    """,
    "atoll": """
        case "$2" in
            start) touch "$ATOLL_DIR/started"; read -r code < "$ATOLL_DIR/drained"; exit "$code" ;;
            drain) echo "$CODE" > "$ATOLL_DIR/drained"; read -r _ < "$ATOLL_DIR/ended" ;;
        esac
    """,
}
"""Played by scripts: Slurm, and a node that ends once it is drained, while `atoll node drain` still waits."""


@pytest.mark.parametrize("code", [0, 71])
def test_a_job_of_slurm_whose_time_is_up_ends_with_the_code_of_its_node(
    tmp_path: Path, code: int
) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    os.mkfifo(tmp_path / "drained")
    os.mkfifo(tmp_path / "ended")
    told = {"ATOLL_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "1", "SLURM_NNODES": "1"}
    environment = (
        os.environ | told | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": f"{code}"}
    )
    with subprocess.Popen(["bash", DEPLOY / "slurm.sh"], env=environment) as job:
        try:
            while not (tmp_path / "started").exists():
                assert job.poll() is None
                time.sleep(0.01)
            job.terminate()
            # Opens once the drain waits; by then its node has ended.
            (tmp_path / "ended").write_text("yes\n")
            assert job.wait(timeout=60) == code
        finally:
            job.kill()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (403, 0), (503, 1), (None, 1)])
def test_a_daemon_that_answers_is_healthy(status: int | None, code: int) -> None:
    spec = importlib.util.spec_from_file_location("healthy", DEPLOY / "healthy.py")
    assert spec is not None and spec.loader is not None
    healthy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(healthy)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status or 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_port
    if status is None:
        server.server_close()
        assert healthy.main(port) == code
        return
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    try:
        assert healthy.main(port) == code
    finally:
        thread.join()
        server.server_close()
