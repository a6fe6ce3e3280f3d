"""`rl`: in one process (colocated.py) or several (processes.py)."""

from hone.config.rl import RLConfig
from hone.environments import Environment
from hone.launch.watching import Watcher


def main(config: RLConfig, watcher: Watcher | None = None, environments: dict[str, Environment] | None = None) -> None:
    """`watcher` is told of each step; `environments`: by name, instead of loading those of the configuration."""
    if uses_processes(config):
        if environments is not None:
            raise ValueError("an environment that is an object stays in this process; processes need its id")
        from hone.launch.processes import launch

        launch(config, watcher)
    else:
        from hone.launch.colocated import main as run

        run(config, watcher, environments)


def uses_processes(config: RLConfig) -> bool:
    if config.inference is not None and (config.inference.backend == "vllm" or config.inference.needs_vllm):
        if config.deployment == "colocated":
            raise ValueError("deployment colocated: in one process samples Hone's engine; vLLM needs processes")
        return True
    if config.inference is not None and config.inference_replicas > 1:
        if config.deployment == "colocated":
            raise ValueError("inference_replicas: in one process there is one sampler; several servers need processes")
        return True
    if config.deployment != "auto":
        return config.deployment == "processes"
    import torch

    return torch.cuda.device_count() > 1 and config.model.device != "cpu"
