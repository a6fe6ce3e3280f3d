"""Start a server for one evaluation, if none is given and the model can be loaded here.

MODEL, or an adapter's directory ─► `inference` process on a free local port ─► Endpoint; it ends with this process
"""

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from hone.child_process import HONE, Process, end_processes, start_process
from hone.config.sections import LOOPBACK
from hone.evals.endpoints import Endpoint, find_endpoint, is_named
from hone.process_report import read_report

REPORT_POLL_SECONDS = 0.02  # between reads of a starting server's report


def can_be_loaded(model: str) -> bool:
    """Return True for a directory with a model or an adapter, or a name that may be a hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None
        and not path.exists()
        and model[0] not in "./~"
    )


def is_path(model: str) -> bool:
    """Return True if the name of a model can only be a directory."""
    return model[:1] in ("/", ".", "~") or model.count("/") > 1


@contextlib.contextmanager
def endpoint_for(
    model: str,
    base_url: str | None,
    key_variable: str,
    registry: str,
    chat_template: str | None = None,
) -> Iterator[Callable[[], Endpoint]]:
    """Context manager for an existing server, or for one that it starts.

    It yields a function that waits until the server answers, and returns its endpoint.

    An existing server is given by `base_url`, by the registry's entry `model`, or else by the
    registry's default entry. If the model can be loaded here, a new server is started in two cases:
    no server is given, or only the default entry applies and either its server does not serve the
    model or `chat_template` is given. But for a hub id, a default server on another machine is
    always used. Raises ValueError if no server is given and none can be started, or if
    `chat_template` is given for an existing server.
    """
    found = None
    path = Path(model).expanduser()
    if (
        base_url is None
        and path.is_dir()
        and not can_be_loaded(model)
        and not is_named(model, registry)
    ):
        inside = [*path.glob("checkpoint-*"), *path.glob("weights/step_*"), *path.glob("step_*")]
        newest = max(inside, key=lambda one: one.stat().st_mtime, default=None)
        hint = f"; did you mean {newest}?" if newest else ""
        raise ValueError(
            f"{model} is neither a model nor an adapter: it has no config.json, no adapter_config.json{hint}"
        )
    if base_url is None and is_path(model) and not path.exists():
        raise ValueError(f"-m {model}: there is no such directory")
    try:
        found = find_endpoint(model, base_url, key_variable, registry)
    except ValueError:
        if base_url is not None or not can_be_loaded(model):
            raise
    is_here = (
        Path(model).expanduser().is_dir()
        or found is None
        or httpx.URL(found.base_url).host in LOOPBACK
    )
    is_own = found is None or (found.is_default and is_here and can_be_loaded(model))
    if found is not None and not (is_own and (chat_template is not None or not _is_serving(found))):
        if chat_template is not None:
            raise ValueError(
                f"--chat-template is for a model that is loaded here; {found.base_url} renders by its own: start it "
                "with --model.chat-template"
            )
        yield lambda: found
        return
    with own_server(model, chat_template) as await_endpoint:
        yield await_endpoint


def _is_serving(endpoint: Endpoint) -> bool:
    """Return True if the server answers and has the model."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    uses_proxy = httpx.URL(endpoint.base_url).host not in LOOPBACK
    try:
        url = f"{endpoint.base_url.rstrip('/')}/models"
        answer = httpx.get(url, headers=headers, timeout=5.0, trust_env=uses_proxy)
        return endpoint.model in [card["id"] for card in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def own_server(model: str, chat_template: str | None = None) -> Iterator[Callable[[], Endpoint]]:
    """Context manager that starts a server for a model or an adapter.

    It yields a function that waits until the server answers, and returns its endpoint; this raises
    ValueError with the server's message if it does not start. For an adapter, the server loads the
    base model too.
    """
    words = server_arguments(model)
    words += [] if chat_template is None else ["--model.chat-template", chat_template]
    print(f"no server is given: {model} is loaded here for this evaluation", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        process = start_process(
            [*HONE, "inference", *words, "--port", "0"],
            {"HONE_API_KEY": ""},
            report,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield lambda: Endpoint(_await_url(process, report), model, None, is_own=True)
        finally:
            end_processes(process, term_seconds=10.0)


def server_arguments(model: str) -> list[str]:
    """Return the arguments of `inference` that serve a model or an adapter under the name `model`.

    Raises ValueError if the name looks like an option, or an adapter does not name its base model.
    """
    if model.startswith("-"):
        raise ValueError(f"{model!r} is no name of a model")
    adapter = Path(model).expanduser() / "adapter_config.json"
    if not adapter.is_file() or (adapter.parent / "config.json").exists():
        return ["--model.name", model]
    base = json.loads(adapter.read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{adapter} does not say of which model it is an adapter (base_model_name_or_path)"
        )
    return ["--model.name", base, "--adapters", json.dumps({model: str(adapter.parent)})]


def _await_url(process: Process, report: Path) -> str:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REPORT_POLL_SECONDS)
        found = read_report(report)
        if "url" in found:
            return str(found["url"])
        if process.returncode is not None:
            raise ValueError(found.get("error") or "the server did not start")
