"""The chart k8s/prime-rl: rendered, checked, and its pods run as processes of network namespaces. Marked `helm`: needs
HELM_TOOLS, a directory with helm, helm3 and kubernetes-validate (make test-helm); the pods need root."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml

from . import namespaces
from .conftest import HANG_SECONDS, ROOT, read_rows

pytestmark = pytest.mark.helm
CHART = ROOT / "k8s" / "prime-rl"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
VERSIONS = ("1.28", "1.32", "1.34", "1.37")  # of Kubernetes
SEED = [f"--set={name}.autoStart=false" for name in ("orchestrator", "inference", "trainer")]


@pytest.fixture(scope="module")
def tools():
    if not (place := os.environ.get("HELM_TOOLS")):
        pytest.skip("HELM_TOOLS is not set (make test-helm)")
    return Path(place).absolute() / "bin"


def run(*words, cwd=CHART, ok=True):
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout if ok else done.stderr


def rendered(tools, *options, release="my-exp", helm="helm", namespace="default"):
    text = run(tools / helm, "template", release, CHART, "--namespace", namespace, *options)
    return text, [one for one in yaml.safe_load_all(text) if one]


def of_kind(manifests, kind):
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def pods_of(manifests):
    """The pod templates by the name of their component, whatever holds them."""
    found = {}
    for one in manifests:
        if one["kind"] == "StatefulSet":
            template = one["spec"]["template"]
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
        if one["kind"] == "JobSet":
            for job in one["spec"]["replicatedJobs"]:
                found[job["name"]] = job["template"]["spec"]["template"]
    return found


# ---------------------------------------------------------------------------------------------- what is rendered


@pytest.mark.parametrize("workload", ["StatefulSet", "JobSet"])
@pytest.mark.parametrize(
    "example", [None, *EXAMPLES], ids=lambda one: one.stem if one else "defaults"
)
def test_strict_lint_both_helms_and_the_schemas_of_kubernetes(tools, tmp_path, example, workload):
    options = ["--set", f"workload={workload}", *(["-f", example] if example else [])]
    run(tools / "helm", "lint", "--strict", CHART, *options)
    text, manifests = rendered(tools, *options)
    assert rendered(tools, *options, helm="helm3")[0] == text
    for one in list(manifests):  # the jobs that a JobSet's controller makes of it
        if one["kind"] == "JobSet":
            manifests.remove(one)
            assert_is_jobset(tools, one)
            manifests += [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {"name": job["name"]},
                    **job["template"],
                }
                for job in one["spec"]["replicatedJobs"]
            ]
            for job in manifests[-3:]:
                job["metadata"]["name"] = "a-job"
    file = tmp_path / "all.yaml"
    file.write_text("\n---\n".join(map(yaml.safe_dump, manifests)))
    for version in VERSIONS:
        run(tools / "kubernetes-validate", "-k", version, "--strict", "--quiet", file)


def assert_is_jobset(tools, one):
    """Read and written by the types that Kubeflow generates from JobSet's own, nothing is lost or refused."""
    program = (
        "import json, sys; from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as J; "
        "print(json.dumps(J.from_dict(json.load(sys.stdin)).to_dict()))"
    )
    done = subprocess.run(
        [tools.parent / "venv" / "bin" / "python", "-c", program],
        input=json.dumps(one),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    back = json.loads(done.stdout)
    assert not (lost := list(differences(one, back))), lost


def differences(wanted, found, place=""):
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            if value in ({}, []) and not (found or {}).get(key):
                continue
            yield from differences(value, (found or {}).get(key), f"{place}.{key}")
    elif isinstance(wanted, list):
        for i, value in enumerate(wanted):
            yield from differences(
                value, found[i] if found and i < len(found) else None, f"{place}[{i}]"
            )
    elif wanted != found:
        yield f"{place}: {wanted!r} became {found!r}"


def test_the_lines_of_the_example_page(tools):
    """`helm install my-exp ./prime-rl -f ./prime-rl/examples/reverse-text.yaml`, from k8s/, and what is typed after."""
    words = ("template", "my-exp", "./prime-rl", "-f", "./prime-rl/examples/reverse-text.yaml")
    manifests = list(yaml.safe_load_all(run(tools / "helm", *words, *SEED, cwd=ROOT / "k8s")))
    assert set(of_kind(manifests, "StatefulSet")) == {
        "my-exp-inference",
        "my-exp-orchestrator",
        "my-exp-trainer",
    }
    assert list(of_kind(manifests, "PersistentVolumeClaim")) == ["prime-rl-shared-data"]
    for name, pod in pods_of(manifests).items():
        assert (
            pod["metadata"]["labels"].items()
            >= {"app": "prime-rl", "example": "reverse-text"}.items()
        )
        (container,) = pod["spec"]["containers"]
        assert "sleep infinity" in container["command"][-1] and "readinessProbe" not in container
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert mounts["/data"] == "data" and container["workingDir"] == "/app"
        given = {one["name"]: one.get("value") for one in container["env"]}
        assert given["INFERENCE_URL"] == "http://my-exp-inference:8000/v1"
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        assert gpus == (None if name == "orchestrator" else 1)
    manifests = list(yaml.safe_load_all(run(tools / "helm", *words, cwd=ROOT / "k8s")))
    commands = {
        name: pod["spec"]["containers"][0]["command"][4:]
        for name, pod in pods_of(manifests).items()
    }
    assert commands["orchestrator"][:5] == [
        "orchestrator",
        "@",
        "/app/examples/reverse_text/rl/orch.toml",
        "--output-dir",
        "/data/outputs",
    ]
    assert commands["trainer"][:3] == ["trainer", "@", "/app/examples/reverse_text/rl/train.toml"]
    assert commands["inference"][:3] == [
        "inference",
        "@",
        "/app/examples/reverse_text/rl/infer.toml",
    ]
    for words in commands.values():
        assert (ROOT / Path(words[2]).relative_to("/app")).is_file()


def test_two_releases_in_one_namespace_do_not_meet(tools):
    sets = [
        rendered(tools, "-f", CHART / "examples" / "reverse-text-tiny.yaml", release=r)[1]
        for r in ("a", "b")
    ]
    names = [{(one["kind"], one["metadata"]["name"]) for one in manifests} for manifests in sets]
    assert not names[0] & names[1]
    labels = [pod["metadata"]["labels"] for pod in pods_of(sets[1]).values()]
    for one in sets[0]:
        selector = one["spec"].get("selector") if one["kind"] == "Service" else None
        selector = (
            one["spec"]["selector"]["matchLabels"] if one["kind"] == "StatefulSet" else selector
        )
        if selector:
            assert not any(selector.items() <= found.items() for found in labels)
            own = [pod["metadata"]["labels"] for pod in pods_of(sets[0]).values()]
            assert sum(selector.items() <= found.items() for found in own) == 1
    urls = [pods_of(one)["orchestrator"]["spec"]["containers"][0]["env"] for one in sets]
    assert urls[0] != urls[1]


def test_everything_is_in_the_namespace_and_the_claim_outlives_the_release(tools):
    options = ("-f", EXAMPLES[0], "--set", "apiKey.value=secret")
    manifests = rendered(tools, *options, namespace="research")[1]
    assert {one["metadata"]["namespace"] for one in manifests} == {"research"}
    (claim,) = of_kind(manifests, "PersistentVolumeClaim").values()
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    own = rendered(tools, "--set", "storage.existingClaim=mine")[1]
    assert not of_kind(own, "PersistentVolumeClaim")
    assert all(
        {"name": "data", "persistentVolumeClaim": {"claimName": "mine"}} in pod["spec"]["volumes"]
        for pod in pods_of(own).values()
    )


def test_the_key_comes_from_a_secret_where_one_is_given(tools):
    for options, name in (
        (("apiKey.value=x",), "my-exp-api-key"),
        (("apiKey.existingSecret=own",), "own"),
    ):
        manifests = rendered(tools, *(word for option in options for word in ("--set", option)))[1]
        for pod in pods_of(manifests).values():
            found = {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}
            assert found["HONE_API_KEY"]["valueFrom"]["secretKeyRef"] == {
                "name": name,
                "key": "api-key",
            }
            assert "key" not in [one["name"] for one in pod["spec"].get("initContainers", [])]


def test_a_changed_configuration_starts_the_pods_again(tools):
    def sums(*options):
        pods = pods_of(
            rendered(tools, "-f", CHART / "examples" / "reverse-text-tiny.yaml", *options)[1]
        )
        return {pod["metadata"]["annotations"]["checksum/config"] for pod in pods.values()}

    assert len(sums()) == 1 and sums() != sums("--set", "config.train\\.toml=max_steps = 3")


def leaves(values, place=()):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*place, key))
        else:
            yield (*place, key), value


def test_every_value_of_a_wrong_type_is_refused_and_so_is_an_unknown_key(tools, tmp_path):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    file, taken = tmp_path / "values.yaml", []
    free = {"podSecurityContext", "securityContext"}  # Kubernetes' own types
    for place, value in leaves(values):
        if place[0] in free:
            continue
        wrong = {"a": [1]} if not isinstance(value, dict) else "text"
        tree = wrong
        for key in reversed(place):
            tree = {key: tree}
        file.write_text(yaml.safe_dump(tree))
        done = subprocess.run(
            [tools / "helm", "template", "x", CHART, "-f", file],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        if done.returncode == 0 or place[-1] not in done.stderr:
            taken.append((".".join(place), done.stderr[:200]))
    assert not taken, taken
    assert "learning_rate" in run(
        tools / "helm", "template", "x", CHART, "--set", "trainer.learning_rate=1", ok=False
    )


def test_several_pods_of_a_trainer_meet_by_name(tools):
    """Each is told which it is by Kubernetes; servers are asked each by its own name."""
    options = ("--set", "trainer.replicas=2,trainer.gpus=8,inference.replicas=2")
    for workload, first in (("StatefulSet", "my-exp-trainer-0"), ("JobSet", "my-exp-trainer-0-0")):
        manifests = rendered(tools, *options, "--set", f"workload={workload}")[1]
        pods = pods_of(manifests)
        words = pods["trainer"]["spec"]["containers"][0]["command"]
        assert words[4:14] == [
            "python",
            "-m",
            "hone.launch.rank_launcher",
            "--ranks",
            "8",
            "--nodes",
            "2",
            "--node",
            "$(POD_INDEX)",
            "--meet",
        ]
        assert words[14] == f"{first}.my-exp-trainer:29500"
        services = of_kind(manifests, "Service")
        assert services["my-exp-trainer"]["spec"]["clusterIP"] == "None"
        words = pods["orchestrator"]["spec"]["containers"][0]["command"]
        urls = json.loads(words[words.index("--client.base-url") + 1])
        assert len(urls) == 2 and all(".my-exp-inference:8000/v1" in url for url in urls)


# ---------------------------------------------------------------------------------------------- what runs

MODEL = "/app/src/hone/launch/workspace/models/reverse-text-tiny-sft"
SHORT = '{"texts": "generated", "min_chars": 4, "max_chars": 8}'
SERVICES = {"inference": 0, "orchestrator": 1, "trainer": 2}


class Pod:
    """A pod of one container, as processes on this machine: what its manifest says, and the restarts of a kubelet."""

    def __init__(self, name, template, nodes, number, volumes, log):
        self.name, self.spec, self.log = name, template["spec"], log
        self.where, self.volumes, self.restarts = nodes.words(number), volumes, 0
        self.process = None
        self.is_over = threading.Event()
        self.keeper = threading.Thread(target=self._keep, daemon=True)

    def start(self):
        self.keeper.start()
        return self

    def _environment(self, container):
        fields = {"metadata.name": f"my-exp-{self.name}-0"}
        found = {
            "PATH": f"/app/.venv/bin:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        for one in container["env"]:
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[one["name"]] = one["value"] if "value" in one else fields.get(field, "0")
        return found

    def command(self, container, words):
        """A command in the container: its volumes are mounted in a mount namespace of its own."""
        given = self._environment(container)
        for name, value in given.items():
            words = [word.replace(f"$({name})", value) for word in words]
        mounted = {
            one["mountPath"]: one["name"]
            for one in container["volumeMounts"]
            if one["name"] in self.volumes
        }
        mounts = {"/app": ROOT, **{target: self.volumes[name] for target, name in mounted.items()}}
        binds = [
            f"mount --bind {shlex.quote(str(place))} {shlex.quote(target)}"
            for target, place in mounts.items()
        ]
        if any(ROOT.is_relative_to(target) for target in mounted):
            # A volume hides the checkout, whose path the scripts of the environment name: it is mounted there again.
            binds += [
                f"mkdir -p {shlex.quote(str(ROOT))}",
                f"mount --bind /app {shlex.quote(str(ROOT))}",
            ]
        script = f'set -e; {"; ".join(binds)}; cd {container["workingDir"]}; exec env -i "$@"'
        return [
            *self.where,
            "bash",
            "-c",
            script,
            "pod",
            *(f"{k}={v}" for k, v in given.items()),
            *words,
        ]

    def _run(self, container):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command(container, container["command"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process.wait()

    def _keep(self):
        for container in self.spec.get("initContainers", []):
            while self._run(container) and not self.is_over.is_set():
                time.sleep(1)
        while not self.is_over.is_set():
            self._run(self.spec["containers"][0])
            self.restarts += 1
            time.sleep(0.5)

    def inside(self, *words):
        done = subprocess.run(
            self.command(self.spec["containers"][0], list(words)),
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        return done.returncode, done.stdout + done.stderr

    def delete(self):
        """As Kubernetes does: what is to be done before it, SIGTERM, SIGKILL after the grace period."""
        self.is_over.set()
        (container,) = self.spec["containers"]
        before = container.get("lifecycle", {}).get("preStop")
        if self.process is None:
            return None
        if before and self.process.poll() is None:
            self.inside(*before["exec"]["command"])
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.spec["terminationGracePeriodSeconds"] if before else 30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.keeper.join(10)
        return self.process.returncode

    def text(self):
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def cluster(tmp_path):
    """Directories for the volumes, places to mount them, and a namespace a pod, with the names that services give."""
    if not namespaces.is_possible() or not shutil.which("unshare"):
        pytest.skip("network namespaces need root and iproute2")
    made = [path for path in map(Path, ("/app", "/data", "/config")) if not path.exists()]
    for path in made:
        path.mkdir()
    names = [f"my-exp-{name}-0" for name in SERVICES]
    others = {}
    for name, i in SERVICES.items():
        others |= {
            f"my-exp-{name}": f"10.78.3.{10 + i}",
            f"my-exp-{name}-0.my-exp-{name}": f"10.78.3.{10 + i}",
        }
    with namespaces.Nodes(names, others=others) as nodes:
        yield nodes
    for path in made:
        path.rmdir()


def copy_compiled_kernels(data):
    """Copy this machine's compiled kernels, and nothing else of its cache, to the pods' volume."""
    known = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hone" / "kernels"
    if known.is_dir() and not (data / ".cache").exists():
        shutil.copytree(known, data / ".cache" / "hone" / "kernels")


def volumes_of(tmp_path, name, manifests):
    found = {
        "data": tmp_path / "data",
        "config": tmp_path / "config",
        "tmp": tmp_path / name / "tmp",
    }
    for path in found.values():
        path.mkdir(parents=True, exist_ok=True)
    copy_compiled_kernels(found["data"])
    for one in of_kind(manifests, "ConfigMap").values():
        for file, text in (one.get("data") or {}).items():
            (found["config"] / file).write_text(text)
    return found


def started(tools, nodes, tmp_path, *options):
    manifests = rendered(tools, "-f", CHART / "examples" / "reverse-text-tiny.yaml", *options)[1]
    templates = pods_of(manifests)
    return {
        name: Pod(
            name,
            templates[name],
            nodes,
            i,
            volumes_of(tmp_path, name, manifests),
            tmp_path / f"{name}.log",
        ).start()
        for name, i in SERVICES.items()
    }


def until(condition, pods):
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        is_alive = all(pod.keeper.is_alive() or pod.is_over.is_set() for pod in pods.values())
        assert is_alive and time.monotonic() < deadline, "\n".join(
            f"== {name}\n{pod.text()[-3000:]}" for name, pod in pods.items()
        )
        time.sleep(0.2)


def rows(tmp_path):
    file = tmp_path / "data" / "outputs" / "metrics.jsonl"
    return read_rows(file) if file.exists() else []


def test_the_pods_of_the_tiny_example_train_and_sleep_and_survive_a_crash_and_an_eviction(
    tools, cluster, tmp_path
):
    pods = started(tools, cluster, tmp_path)
    try:
        until(lambda: len(rows(tmp_path)) >= 23, pods)  # a checkpoint is at step 20
        trainer = int((tmp_path / "trainer" / "tmp" / "component").read_text())
        os.kill(trainer, signal.SIGKILL)
        until(lambda: pods["trainer"].restarts == 1, pods)
        until(lambda: len(rows(tmp_path)) >= 30, pods)
        code = pods["trainer"].delete()  # a node is drained: a checkpoint at the next step
        assert "ended with code 85" in pods["trainer"].text() and code is not None
        left = sorted(
            int(one.name[5:]) for one in (tmp_path / "data/outputs/checkpoints").glob("step_*")
        )[-1]
        assert left % 20 and left >= 30, left
        volumes = pods["trainer"].volumes
        pods["trainer"] = Pod(
            "trainer",
            {"spec": pods["trainer"].spec},
            cluster,
            2,
            volumes,
            tmp_path / "trainer2.log",
        ).start()
        until(
            lambda: all(
                "the pod stays" in pods[name].text() for name in ("orchestrator", "trainer")
            ),
            pods,
        )
        assert (
            tmp_path / "data" / "outputs" / "weights" / "step_60" / "model.safetensors"
        ).is_file()
        found = {row["step"]: row["reward/mean"] for row in rows(tmp_path) if "reward/mean" in row}
        assert set(found) == set(range(1, 61)) and found[60] > found[1] + 0.1, found
        assert (
            f"Resuming from step {left}" in pods["trainer"].text()
            or f"step_{left}" in pods["trainer"].text()
        )

        # Drained after the end: they see that it is over
        for i, name in enumerate(("orchestrator", "trainer"), 1):
            pods[name].delete()
            again = Pod(
                name,
                {"spec": pods[name].spec},
                cluster,
                i,
                pods[name].volumes,
                tmp_path / f"{name}3.log",
            )
            pods[name] = again.start()
        until(
            lambda: all(
                "the pod stays" in pods[name].text() for name in ("orchestrator", "trainer")
            ),
            pods,
        )

        key = tmp_path / "data" / ".keys" / "my-exp"
        assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_text().strip()) == 32
        asked = f"""vf-eval reverse-text -m {MODEL} -b $INFERENCE_URL -n 4 -r 1 --max-tokens 20 -a '{SHORT}'"""
        code, said = pods["trainer"].inside("bash", "-c", asked)
        assert code == 0, said
        test = of_kind(
            rendered(tools, "-f", CHART / "examples" / "reverse-text-tiny.yaml")[1], "Pod"
        )["my-exp-answers"]
        done = subprocess.run(
            pods["orchestrator"].command(
                test["spec"]["containers"][0], test["spec"]["containers"][0]["command"]
            ),
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0, done.stderr
    finally:
        for pod in pods.values():
            pod.delete()


def test_the_manual_way_of_the_example_page(tools, cluster, tmp_path):
    """Sleeping pods, and in each the commands that the page types, `uv run` included."""
    uv = shutil.which("uv", path=f"{ROOT / '.uv' / 'bin'}:{os.environ['PATH']}")
    pods = started(tools, cluster, tmp_path, *SEED)
    typed = {
        "inference": "uv run inference @ /config/infer.toml",
        "orchestrator": "uv run orchestrator @ /config/orch.toml --output-dir /data/outputs "
        "--client.base-url '[\"'$INFERENCE_URL'\"]' --max-steps 3",
        "trainer": "uv run trainer @ /config/train.toml --output-dir /data/outputs --max-steps 3",
    }
    programs = shlex.quote(str(Path(uv).parent))
    offline = (
        f'export PATH={programs}:"$PATH" UV_PROJECT=/app UV_NO_SYNC=1 UV_OFFLINE=1 UV_FROZEN=1; '
    )
    running = {}
    try:
        until(lambda: (tmp_path / "data" / ".keys" / "my-exp").exists(), pods)
        for name, words in typed.items():
            log = (tmp_path / f"{name}_typed.log").open("w")
            running[name] = subprocess.Popen(
                pods[name].command(
                    pods[name].spec["containers"][0], ["bash", "-c", offline + words]
                ),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        for name in ("orchestrator", "trainer"):
            code = running[name].wait(HANG_SECONDS)
            assert code == 0, (tmp_path / f"{name}_typed.log").read_text()[-3000:]
        assert (tmp_path / "data" / "outputs" / "weights" / "step_3").is_dir()
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for pod in pods.values():
            pod.delete()
