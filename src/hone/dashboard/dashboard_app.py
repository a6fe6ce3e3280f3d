"""HTTP routes of the dashboard. views.py makes their content; jobs.py starts and stops runs.

/  /assets/…          the page
/api/runs, /api/run, /api/series, /api/rollouts, /api/rollout, /api/log, /api/doctor, /api/plot
/api/histogram, /api/machine
/api/lab, /api/lab/config, /api/lab/check, /api/lab/start, /api/evaluate, /api/jobs/NAME/{stop,kill,resume,remove}
/api/note             names, tags and notes
/api/playground, /api/playground/{start,ask,stop}
/api/ticket
/download/TICKET      a checkpoint as an archive, once
"""

import asyncio
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hone.dashboard.archive import tar_directory
from hone.dashboard.gpus import read_gpus
from hone.dashboard.guard import Guard
from hone.dashboard.jobs import Jobs
from hone.dashboard.playground import Playground
from hone.dashboard.runs import config_of
from hone.dashboard.views import Runs

ASSETS = Path(__file__).parent / "assets"
PAGE_ROLLOUTS = 50  # rollouts per page by default
MAX_PAGE_ROLLOUTS = 200
TICKET_SECONDS = 60.0  # within which a download has to begin
MAX_SERIES = 200
# Query parameters that filter rollouts, by type.
NUMBER_FILTERS = (
    "step_from",
    "step_to",
    "reward_from",
    "reward_to",
    "tokens_from",
    "tokens_to",
    "group",
)
TEXT_FILTERS = ("env", "stop", "unused", "example", "text")
FLAG_FILTERS = ("failed", "truncated")
JOB_ACTIONS = ("stop", "kill", "resume", "remove")


def build_app(
    root: Path, token: str, host: str = "127.0.0.1", cache: Path | None = None
) -> Starlette:
    routes = DashboardRoutes(Runs(root, cache), Jobs(root)).list_routes()
    middleware = [
        Middleware(Guard, token=token, host=host),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
    ]
    return Starlette(routes=routes, middleware=middleware)


class DashboardRoutes:
    """The handlers of the routes."""

    def __init__(self, runs: Runs, jobs: Jobs) -> None:
        self.runs = runs
        self.jobs = jobs
        self.playground = Playground(jobs.home)
        self.tickets: dict[str, tuple[float, Path]] = {}  # valid until, directory

    def list_routes(self) -> list[Route | Mount]:
        runs = self.runs
        jobs = self.jobs

        def list_runs() -> dict[str, Any]:
            return {"runs": runs.list_runs(), "root": str(runs.root)}

        return [
            Route("/", self.get_page),
            Mount("/assets", StaticFiles(directory=ASSETS)),
            Route("/api/runs", make_route(list_runs)),
            Route("/api/run", make_route(self.describe_run, "run")),
            Route("/api/series", self.get_series),
            Route("/api/rollouts", self.get_rollouts),
            Route("/api/rollout", self.get_rollout),
            Route("/api/log", make_route(runs.read_log, "run", "name")),
            Route("/api/doctor", make_route(runs.examine_run, "run")),
            Route("/api/plot", self.get_plot),
            Route("/api/histogram", make_route(self.read_histogram, "run")),
            Route("/api/machine", make_route(read_gpus)),
            Route("/api/note", self.write_note, methods=["POST"]),
            Route("/api/playground", make_route(self.playground.describe)),
            Route("/api/playground/{what}", self.use_playground, methods=["POST"]),
            Route("/api/lab/config", make_route(self.read_changed_keys, "run")),
            Route("/api/lab", make_route(jobs.describe_lab)),
            Route("/api/lab/recipe", make_route(jobs.read_recipe, "name")),
            Route("/api/lab/check", self.check_config, methods=["POST"]),
            Route("/api/lab/start", self.start_run, methods=["POST"]),
            Route("/api/evaluate", self.start_evaluation, methods=["POST"]),
            Route("/api/jobs/{name}/{what}", self.act_on_job, methods=["POST"]),
            Route("/api/job", make_route(jobs.read_log, "name")),
            Route("/api/ticket", self.create_ticket, methods=["POST"]),
            Route("/download/{ticket}", self.download_archive),
        ]

    async def get_page(self, request: Request) -> Response:
        return FileResponse(ASSETS / "index.html")

    def describe_run(self, name: str) -> dict[str, Any]:
        # The directory as commands name it.
        typed = os.path.relpath(self.runs.get_run(name)[0].path, self.jobs.home)
        jobs = [job for job in self.jobs.list_jobs() if job["run"] == name]
        return self.runs.run_detail(name) | {"typed": typed, "jobs": jobs}

    async def get_series(self, request: Request) -> Response:
        query = request.query_params
        names = query.get("names", "").split(",")
        since = int_of(query.get("since"), -1)

        def read_series() -> dict[str, Any]:
            index = self.runs.get_run(query.get("run", ""))[1]
            index.update_metrics()
            return index.metric_series(names[:MAX_SERIES], since)

        return await answer_with(read_series)

    async def get_rollouts(self, request: Request) -> Response:
        query = request.query_params

        def read_rollouts() -> dict[str, Any]:
            index = self.runs.get_run(query.get("run", ""))[1]
            is_reading = self.runs.update_run(query["run"])
            filters: dict[str, Any] = {
                name: number_of(query[name]) for name in NUMBER_FILTERS if query.get(name)
            }
            filters |= {name: query[name] for name in TEXT_FILTERS if query.get(name)}
            filters |= {name: True for name in FLAG_FILTERS if query.get(name) == "1"}
            most = min(int_of(query.get("most"), PAGE_ROLLOUTS), MAX_PAGE_ROLLOUTS)
            skip = max(0, int_of(query.get("skip"), 0))
            sort = query.get("sort") or "step"
            is_descending = query.get("down", "1") == "1"
            found = index.find_rollouts(filters, sort, is_descending, most, skip)
            return found | {
                "kinds": index.filter_values(),
                "indexed": index.progress,
                "reading": is_reading,
            }

        return await answer_with(read_rollouts)

    async def get_rollout(self, request: Request) -> Response:
        query = request.query_params
        run = query.get("run", "")
        number = int_of(query.get("n"), -1)
        return await answer_with(lambda: self.runs.read_rollout(run, number))

    async def get_plot(self, request: Request) -> Response:
        query = request.query_params
        kind = "png" if query.get("format") == "png" else "svg"

        def draw_plot() -> Response:
            from hone.dashboard.plots import draw_curves

            names = query.get("run", "").split("|")
            data = draw_curves([self.runs.get_run(name)[1] for name in names], kind)
            return Response(data, media_type="image/png" if kind == "png" else "image/svg+xml")

        return await answer_with(draw_plot)

    def read_histogram(self, name: str) -> dict[str, Any]:
        self.runs.update_run(name)
        return self.runs.get_run(name)[1].reward_histogram()

    def read_changed_keys(self, name: str) -> dict[str, str]:
        run = self.runs.get_run(name)[0]
        return self.jobs.read_changed_keys(run)

    async def write_note(self, request: Request) -> Response:
        body = await body_of(request)

        def write() -> dict[str, Any]:
            run = self.runs.get_run(str(body.get("run")))[0]
            return asdict(self.runs.notes.write(run.id, body))

        return await answer_with(write)

    async def use_playground(self, request: Request) -> Response:
        body = await body_of(request)
        what = request.path_params["what"]

        def use() -> dict[str, Any]:
            if what == "stop":
                return self.playground.stop()
            if what == "ask":
                return self.playground.ask(int_of(str(body.get("model")), -1), body)
            if what != "start":
                raise KeyError(what)
            name = str(body.get("run"))
            weights = str(body.get("name"))
            place = self.runs.find_checkpoint(name, weights)
            models = {weights: os.path.relpath(place, self.jobs.home)}
            if base := self.runs.run_line(self.runs.get_run(name)[0])["model"]:
                models["before training"] = base
            return self.playground.start(models)

        return await answer_with(use)

    async def create_ticket(self, request: Request) -> Response:
        body = await body_of(request)

        def make_ticket() -> dict[str, str]:
            place = self.runs.find_checkpoint(str(body.get("run")), str(body.get("name")))
            now = time.monotonic()
            self.tickets = {key: one for key, one in self.tickets.items() if one[0] >= now}
            key = secrets.token_urlsafe(24)
            self.tickets[key] = (now + TICKET_SECONDS, place)
            return {"url": f"/download/{key}"}

        return await answer_with(make_ticket)

    async def download_archive(self, request: Request) -> Response:
        until, place = self.tickets.pop(request.path_params["ticket"], (0.0, Path()))
        if until < time.monotonic():
            return JSONResponse(
                {"error": "this download is not valid any more: ask for it again"}, 404
            )
        name = f"{place.parent.parent.name}-{place.name}"
        plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
        headers = {
            "content-disposition": f'attachment; filename="{plain}.tar"',
            "content-encoding": "identity",
        }
        archive = tar_directory(place, plain)
        return StreamingResponse(archive, media_type="application/x-tar", headers=headers)

    async def check_config(self, request: Request) -> Response:
        body = await body_of(request)
        command = str(body.get("command"))
        toml = str(body.get("toml", ""))
        return await answer_with(lambda: self.jobs.check_config(command, toml))

    async def start_run(self, request: Request) -> Response:
        body = await body_of(request)
        names = ("command", "toml", "output_dir", "where", "more")
        return await answer_with(
            lambda: self.jobs.start_run(*(str(body.get(name) or "") for name in names))
        )

    async def start_evaluation(self, request: Request) -> Response:
        body = await body_of(request)

        def make_evaluation() -> dict[str, Any]:
            name = str(body.get("run"))
            run = self.runs.get_run(name)[0]
            place = self.runs.find_checkpoint(name, str(body.get("name")))
            if not (place / "config.json").is_file():
                raise ValueError(
                    f"{body.get('name')} is no model: weights are evaluated, checkpoints are not"
                )
            examples = int_of(str(body.get("examples")), 50)
            config = config_of(self.runs.root, run)
            return self.jobs.start_evaluation(run, place, config, examples)

        return await answer_with(make_evaluation)

    async def act_on_job(self, request: Request) -> Response:
        name = request.path_params["name"]
        action = request.path_params["what"]
        if action not in JOB_ACTIONS:
            return JSONResponse({"error": f"no action {action!r}"}, 404)
        return await answer_with(lambda: getattr(self.jobs, action)(name))


def make_route(make: Callable[..., Any], *names: str) -> Callable[[Request], Any]:
    """Return a route handler that calls `make` with the query parameters `names`.

    It responds with the result, or with status 400 if a parameter is missing.
    """

    async def answer_route(request: Request) -> Response:
        query = request.query_params
        missing = [name for name in names if name not in query]
        if missing:
            return JSONResponse({"error": f"missing: {', '.join(missing)}"}, 400)
        return await answer_with(partial(make, *(query[name] for name in names)))

    return answer_route


async def answer_with(make: Callable[[], Any]) -> Response:
    """Run `make` in a thread and return its result as an HTTP response.

    A Response is returned as it is; other results become JSON. None and KeyError become status 404,
    ValueError status 400.
    """
    try:
        found = await asyncio.to_thread(make)
    except KeyError as error:
        return JSONResponse({"error": f"not there: {error.args[0]}"}, 404)
    except ValueError as error:
        return JSONResponse({"error": str(error)}, 400)
    if found is None:
        return JSONResponse({"error": "not there"}, 404)
    return found if isinstance(found, Response) else JSONResponse(found)


async def body_of(request: Request) -> dict[str, Any]:
    try:
        found = await request.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def int_of(text: str | None, otherwise: int) -> int:
    try:
        return int(text or "")
    except ValueError:
        return otherwise


def number_of(text: str) -> float:
    """Parse a number. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None
