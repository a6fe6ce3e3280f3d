"""`rl`: in one process (colocated.py) or several (processes.py)."""

from hone.config.rl import RLConfig
from hone.environments import Environment
from hone.launch.fork import forked
from hone.launch.plan import uses_processes
from hone.launch.watching import Watcher


def main(config: RLConfig, watcher: Watcher | None = None, environments: dict[str, Environment] | None = None) -> None:
    """`watcher` is told of each step; `environments`: by name, instead of loading those of the configuration."""
    config = forked(config)
    if uses_processes(config):
        if environments is not None:
            raise ValueError("an environment that is an object stays in this process; processes need its id")
        from hone.launch.processes import launch

        launch(config, watcher)
    else:
        from hone.launch.colocated import main as run

        run(config, watcher, environments)
