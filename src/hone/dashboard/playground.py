"""Try a run's weights beside the model that the run began with: two servers, and questions to both.

The servers are `inference` processes on loopback. They end with the dashboard, and when other
weights are chosen.
"""

import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hone.child_process import HONE, Process, end_processes, start_process
from hone.evals.own_server import server_arguments
from hone.process_report import read_report

ASK_SECONDS = 300.0  # that an answer may take
MAX_TOKENS = 4096


@dataclass
class ServedModel:
    """A model of the playground and the process that serves it."""

    title: str
    name: str
    process: Process
    directory: Path

    def describe(self) -> dict[str, Any]:
        report = read_report(self.directory / "report.json")
        code = self.process.poll()
        state = "failed" if code is not None else "ready" if "url" in report else "starting"
        error = report.get("error") or self.read_log_end() if state == "failed" else ""
        return {
            "title": self.title,
            "name": self.name,
            "state": state,
            "url": report.get("url", ""),
            "error": error,
        }

    def read_log_end(self) -> str:
        return (self.directory / "log.txt").read_text(errors="replace")[-1000:].strip()


class Playground:
    """The models that are served now, at most two."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._models: list[ServedModel] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def start(self, models: dict[str, str]) -> dict[str, Any]:
        """Serve models, given as {title: name or directory}, in place of those served before."""
        with self._lock:
            self._stop_servers()
            self._directory = tempfile.TemporaryDirectory(prefix="hone_playground")
            for number, (title, name) in enumerate(models.items()):
                place = Path(self._directory.name) / str(number)
                place.mkdir()
                command = [*HONE, "inference", *server_arguments(name), "--port", "0"]
                with (place / "log.txt").open("wb") as log:
                    process = start_process(
                        command,
                        {"HONE_API_KEY": ""},
                        place / "report.json",
                        cwd=self.home,
                        stdout=log,
                        stderr=log,
                    )
                self._models.append(ServedModel(title, name, process, place))
        return self.describe()

    def describe(self) -> dict[str, Any]:
        return {"models": [model.describe() for model in self._models]}

    def stop(self) -> dict[str, Any]:
        with self._lock:
            self._stop_servers()
        return self.describe()

    def _stop_servers(self) -> None:
        end_processes(*(model.process for model in self._models))
        self._models = []
        if self._directory is not None:
            self._directory.cleanup()

    def ask(self, number: int, asked: dict[str, Any]) -> dict[str, Any]:
        """Return a model's answer to a conversation.

        Args:
            number: index of the model in `describe()`.
            asked: messages, temperature, max_tokens and seed, as of a chat request.

        Raises:
            ValueError: the model is not ready, or its server refuses the request.
        """
        shown = self.describe()["models"]
        if not 0 <= number < len(shown) or shown[number]["state"] != "ready":
            raise ValueError("the model is not ready yet")
        body = {
            "model": shown[number]["name"],
            "messages": asked.get("messages") or [],
            "temperature": float(asked.get("temperature", 1.0)),
            "max_tokens": min(int(asked.get("max_tokens", 256)), MAX_TOKENS),
            "seed": int(asked.get("seed", 0)),
        }
        start = time.perf_counter()
        try:
            answer = httpx.post(
                f"{shown[number]['url']}/chat/completions", json=body, timeout=ASK_SECONDS
            )
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ValueError(f"the server does not answer: {error}") from None
        if answer.status_code != 200:
            raise ValueError(str(found.get("error", {}).get("message", found)))
        choice = found["choices"][0]
        return {
            "text": choice["message"].get("content") or "",
            "finish_reason": choice["finish_reason"],
            "tokens": found["usage"]["completion_tokens"],
            "seconds": time.perf_counter() - start,
        }
