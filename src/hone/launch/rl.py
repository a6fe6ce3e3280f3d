"""`rl`: in one process (colocated.py) or several (processes.py)."""

from hone.config.rl import RLConfig


def main(config: RLConfig) -> None:
    if uses_processes(config):
        from hone.launch.processes import launch

        launch(config)
    else:
        from hone.launch.colocated import main as run

        run(config)


def uses_processes(config: RLConfig) -> bool:
    if config.deployment != "auto":
        return config.deployment == "processes"
    import torch

    return torch.cuda.device_count() > 1 and config.model.device != "cpu"
