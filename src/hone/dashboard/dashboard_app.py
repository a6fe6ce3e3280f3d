"""Routes of the dashboard. views.py makes what they show, jobs.py what they start.

/  /assets/…          the page
/api/runs, /api/run, /api/series, /api/rollouts, /api/rollout, /api/log, /api/doctor, /api/plot
/api/lab, /api/lab/check, /api/lab/start, /api/evaluate, /api/jobs/NAME/{stop,kill,resume,remove}, /api/ticket
/download/TICKET      a checkpoint as an archive, once
"""

import asyncio
import os
import re
import secrets
import time
from collections.abc import Callable
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
from hone.dashboard.guard import Guard
from hone.dashboard.jobs import Jobs
from hone.dashboard.runs import config_of
from hone.dashboard.views import Runs

ASSETS = Path(__file__).parent / "assets"
PAGE = 50  # rollouts of a page, unless asked otherwise; and at most
MOST = 200
VALID = 60.0  # seconds in which a download has to begin


def build_app(
    root: Path, token: str, host: str = "127.0.0.1", cache: Path | None = None
) -> Starlette:
    runs, jobs = Runs(root, cache), Jobs(root)
    tickets: dict[str, tuple[float, Path]] = {}

    def make_route(make: Callable[..., Any], *names: str) -> Callable[[Request], Any]:
        """Return a route that answers with the result of `make` for its parameters."""

        async def answer_route(request: Request) -> Response:
            asked = request.query_params
            missing = [name for name in names if name not in asked]
            if missing:
                return JSONResponse({"error": f"missing: {', '.join(missing)}"}, 400)
            return await answer_with(partial(make, *(asked[name] for name in names)))

        return answer_route

    async def answer_with(make: Callable[[], Any]) -> Response:
        """Run `make` in a thread and return its result as it is or as JSON, or 404."""
        try:
            found = await asyncio.to_thread(make)
        except KeyError as error:
            return JSONResponse({"error": f"not there: {error.args[0]}"}, 404)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        if found is None:
            return JSONResponse({"error": "not there"}, 404)
        return found if isinstance(found, Response) else JSONResponse(found)

    def run_detail(name: str) -> dict[str, Any]:
        # Its directory, for commands
        typed = {"typed": os.path.relpath(runs.get_run(name)[0].path, jobs.home)}
        return (
            runs.run_detail(name)
            | typed
            | {"jobs": [job for job in jobs.list_jobs() if job["run"] == name]}
        )

    async def get_series(request: Request) -> Response:
        asked = request.query_params
        names, since = asked.get("names", "").split(","), int_of(asked.get("since"), -1)

        def read_series() -> dict[str, Any]:
            index = runs.get_run(asked.get("run", ""))[1]
            index.update_metrics()
            return index.metric_series(names[:200], since)

        return await answer_with(read_series)

    async def get_rollouts(request: Request) -> Response:
        asked = request.query_params

        def read_rollouts() -> dict[str, Any]:
            index = runs.get_run(asked.get("run", ""))[1]
            is_reading = runs.update_run(asked["run"])
            wanted: dict[str, Any] = {
                name: number_of(asked[name])
                for name in (
                    "step_from",
                    "step_to",
                    "reward_from",
                    "reward_to",
                    "tokens_from",
                    "tokens_to",
                    "group",
                )
                if asked.get(name)
            }
            wanted |= {
                name: asked[name]
                for name in ("env", "stop", "unused", "example", "text")
                if asked.get(name)
            }
            wanted |= {name: True for name in ("failed", "truncated") if asked.get(name) == "1"}
            most, skip = (
                min(int_of(asked.get("most"), PAGE), MOST),
                max(0, int_of(asked.get("skip"), 0)),
            )
            found = index.find_rollouts(
                wanted, asked.get("sort") or "step", asked.get("down", "1") == "1", most, skip
            )
            return found | {
                "kinds": index.filter_values(),
                "indexed": index.progress,
                "reading": is_reading,
            }

        return await answer_with(read_rollouts)

    async def get_rollout(request: Request) -> Response:
        asked = request.query_params
        return await answer_with(
            lambda: runs.read_rollout(asked.get("run", ""), int_of(asked.get("n"), -1))
        )

    async def get_plot(request: Request) -> Response:
        asked = request.query_params
        kind = "png" if asked.get("format") == "png" else "svg"

        def draw_plot() -> Response:
            from hone.dashboard.plots import draw_curves

            data = draw_curves(
                [runs.get_run(name)[1] for name in asked.get("run", "").split("|")], kind
            )
            return Response(data, media_type="image/png" if kind == "png" else "image/svg+xml")

        return await answer_with(draw_plot)

    async def create_ticket(request: Request) -> Response:
        body = await body_of(request)

        def make_ticket() -> dict[str, str]:
            place = runs.find_checkpoint(str(body.get("run")), str(body.get("name")))
            now = time.monotonic()
            for old in [key for key, (until, _) in tickets.items() if until < now]:
                del tickets[old]
            key = secrets.token_urlsafe(24)
            tickets[key] = (now + VALID, place)
            return {"url": f"/download/{key}"}

        return await answer_with(make_ticket)

    async def download_archive(request: Request) -> Response:
        until, place = tickets.pop(request.path_params["ticket"], (0.0, Path()))
        if until < time.monotonic():
            return JSONResponse(
                {"error": "this download is not valid any more: ask for it again"}, 404
            )
        name = f"{place.parent.parent.name}-{place.name}"
        plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
        named = {
            "content-disposition": f'attachment; filename="{plain}.tar"',
            "content-encoding": "identity",
        }
        return StreamingResponse(
            tar_directory(place, plain), media_type="application/x-tar", headers=named
        )

    async def check_config(request: Request) -> Response:
        body = await body_of(request)
        return await answer_with(
            lambda: jobs.check_config(str(body.get("command")), str(body.get("toml", "")))
        )

    async def start_run(request: Request) -> Response:
        body = await body_of(request)
        words = [
            str(body.get(name) or "") for name in ("command", "toml", "output_dir", "where", "more")
        ]
        return await answer_with(lambda: jobs.start_run(*words))

    async def start_evaluation(request: Request) -> Response:
        body = await body_of(request)

        def make_evaluation() -> dict[str, Any]:
            name = str(body.get("run"))
            run, place = runs.get_run(name)[0], runs.find_checkpoint(name, str(body.get("name")))
            if not (place / "config.json").is_file():
                raise ValueError(
                    f"{body.get('name')} is no model: weights are evaluated, checkpoints are not"
                )
            return jobs.start_evaluation(
                run, place, config_of(runs.root, run), int_of(str(body.get("examples")), 50)
            )

        return await answer_with(make_evaluation)

    async def act_on_job(request: Request) -> Response:
        name, what = request.path_params["name"], request.path_params["what"]
        if what not in ("stop", "kill", "resume", "remove"):
            return JSONResponse({"error": f"no action {what!r}"}, 404)
        return await answer_with(lambda: getattr(jobs, what)(name))

    async def get_page(request: Request) -> Response:
        return FileResponse(ASSETS / "index.html")

    routes = [
        Route("/", get_page),
        Mount("/assets", StaticFiles(directory=ASSETS)),
        Route("/api/runs", make_route(lambda: {"runs": runs.list_runs(), "root": str(runs.root)})),
        Route("/api/run", make_route(run_detail, "run")),
        Route("/api/series", get_series),
        Route("/api/rollouts", get_rollouts),
        Route("/api/rollout", get_rollout),
        Route("/api/log", make_route(runs.read_log, "run", "name")),
        Route("/api/doctor", make_route(runs.examine_run, "run")),
        Route("/api/plot", get_plot),
        Route("/api/lab", make_route(jobs.describe_lab)),
        Route("/api/lab/recipe", make_route(jobs.read_recipe, "name")),
        Route("/api/lab/check", check_config, methods=["POST"]),
        Route("/api/lab/start", start_run, methods=["POST"]),
        Route("/api/evaluate", start_evaluation, methods=["POST"]),
        Route("/api/jobs/{name}/{what}", act_on_job, methods=["POST"]),
        Route("/api/job", make_route(jobs.read_log, "name")),
        Route("/api/ticket", create_ticket, methods=["POST"]),
        Route("/download/{ticket}", download_archive),
    ]
    middleware = [
        Middleware(Guard, token=token, host=host),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
    ]
    return Starlette(routes=routes, middleware=middleware)


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
