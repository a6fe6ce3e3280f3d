"""`rl`: run in one process (colocated.py) or several (processes.py)."""

import contextlib
from collections.abc import Iterator

from hone import machine
from hone.child_process import HONE, end_processes, start_process
from hone.config.rl_config import RLConfig
from hone.environments import Environment
from hone.launch.fork import fork_run
from hone.launch.plan import uses_processes
from hone.monitors.events import Events


def main(
    config: RLConfig,
    callbacks: Events | None = None,
    environments: dict[str, Environment] | None = None,
) -> None:
    """Run `rl`, in one process or several.

    Args:
        callbacks: receives the events of the run.
        environments: environments by name, used instead of the configured ones; for a run in one
            process only.
    """
    with dashboard_over(config):
        run_rl(fork_run(config), callbacks, environments)


def run_rl(
    config: RLConfig, callbacks: Events | None, environments: dict[str, Environment] | None
) -> None:
    if uses_processes(config):
        if environments is not None:
            raise ValueError(
                "an environment that is an object stays in this process; processes need its id"
            )
        from hone.launch.processes import run_components

        run_components(config, callbacks)
    else:
        machine.grow_gpu_segments()
        from hone.launch.colocated import main as colocated

        colocated(config, callbacks, environments)


@contextlib.contextmanager
def dashboard_over(config: RLConfig) -> Iterator[None]:
    """Context manager: run the dashboard in a child process if `config.dashboard` is set."""
    if not config.dashboard:
        yield
        return
    config.output_dir.mkdir(parents=True, exist_ok=True)
    process = start_process([*HONE, "dashboard", str(config.output_dir)])
    try:
        yield
    finally:
        end_processes(process)
