"""Plan of a run: the components of a configuration, each with its devices and address.

RLConfig ─ plan ─► [inference …, orchestrator, trainer ranks …] ─► processes.py starts them here;
                                                                   `--dry-run` and Slurm show them
"""

import socket
from dataclasses import dataclass, field
from typing import Any

from hone import machine
from hone.config.base import Config
from hone.config.inference_config import InferenceConfig
from hone.config.rl_config import OrchestratorRunConfig, RLConfig, TrainerRunConfig
from hone.config.sections import API_KEY_VARIABLE, LOOPBACK, NcclConfig, ServeConfig, own_key

SHARED_GPU_GIB = 8.0  # of keys and values
EVERYWHERE = (None, "0.0.0.0", "::")


@dataclass(frozen=True)
class Component:
    """A process of a run.

    Attributes:
        role: its command, such as "trainer".
        name: name of its configuration and log.
        gpus: indices among the run's GPUs on its node.
        address: HOST:PORT of a server.
        environment: additional environment variables.
        restarts: if killed, it is started again without ending the run.
        node: node of a Slurm job; "" for this machine.
    """

    role: str
    name: str
    config: Config
    gpus: tuple[int, ...] = ()
    address: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    restarts: bool = False
    node: str = ""

    @property
    def display_name(self) -> str:
        return (
            f"{self.name} rank {self.environment['RANK']}"
            if "RANK" in self.environment
            else self.name
        )


def uses_processes(config: RLConfig, gpus: int | None = None) -> bool:
    """Return True if the run uses several processes, False if one process does everything.

    `gpus` is the number of available GPUs, by default what torch sees. Raises ValueError if the
    deployment is colocated but the configuration needs several processes.
    """
    if config.inference is not None and (
        config.inference.backend == "vllm" or config.inference.needs_vllm
    ):
        if config.deployment == "colocated":
            raise ValueError(
                "deployment colocated: in one process samples Hone's engine; vLLM needs processes"
            )
        return True
    if config.inference is not None and config.inference_replicas > 1:
        if config.deployment == "colocated":
            raise ValueError(
                "inference_replicas: in one process there is one sampler; several servers need processes"
            )
        return True
    if config.deployment != "auto" or config.trainer_nodes:
        return config.deployment != "colocated"
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    return gpus > 1 and config.model.device != "cpu"


def plan_components(config: RLConfig) -> list[Component]:
    """Return the run's components on this machine, in starting order.

    Raises ValueError if GPUs cannot be divided equally among the servers, or if a server would be
    reachable from other machines without a key.
    """
    key = config.inference and (config.inference.api_key or own_key())
    # In the environment, since written configurations have no secrets.
    keys = {API_KEY_VARIABLE: key} if key else {}
    configs = component_configs(config, has_key=bool(key))
    gpus = {"trainer": config.trainer_gpu_ids, **gpus_of_servers(config)}
    nodes = nodes_of_servers(config)
    parts = []
    for name, one in configs.items():
        role = "inference" if isinstance(one, InferenceConfig) else name
        own = gpus.get(name) if config.model.device != "cpu" else None
        address = ""
        if isinstance(one, InferenceConfig):
            address = f"{nodes[name] or one.server.host or LOOPBACK[0]}:{one.server.port}"
        for node, number, rank in (
            ranks_of_trainer(config) if role == "trainer" else [(nodes.get(name, ""), 0, {})]
        ):
            environment = (
                keys
                | thread_environment(config)
                | visible_gpus(gpus.get(name), config, node)
                | rank
            )
            of_rank = [own[number]] if own and "RANK" in rank else own
            parts.append(
                Component(
                    role,
                    name,
                    one,
                    tuple(of_rank or ()),
                    address,
                    environment,
                    role == "inference",
                    node,
                )
            )
    return parts


def ranks_of_trainer(config: RLConfig) -> list[tuple[str, int, dict[str, str]]]:
    """Return (node, local rank, environment variables) of each trainer process."""
    nodes = config.trainer_nodes or [""]
    count = len(config.trainer_gpu_ids)
    meet = f"{nodes[0]}:{free_port()}" if nodes[0] else ""
    if not meet:
        return [("", number, rank) for number, rank in enumerate(environments_of_ranks(count))]
    return [
        (node, number, rank)
        for k, node in enumerate(nodes)
        for number, rank in enumerate(environments_of_ranks(count, len(nodes), k, meet))
    ]


def nodes_of_servers(config: RLConfig) -> dict[str, str]:
    names = names_of_servers(config)
    nodes = config.inference_nodes or [""]
    return {name: nodes[i * len(nodes) // len(names)] for i, name in enumerate(names)}


def format_placement(config: RLConfig, gpus: int, node: str = "this machine") -> list[str]:
    """Return a table of components, devices and addresses on a machine with `gpus` GPUs."""
    rows = [("component", "node", "devices", "address")]
    is_fixed = config.inference is None or config.inference.server.port != 0
    if not uses_processes(config, gpus):
        rows.append(("rl", node, "GPU 0" if gpus and config.model.device != "cpu" else "CPU", ""))
    for part in plan_components(config) if uses_processes(config, gpus) else []:
        devices = f"GPU {', '.join(map(str, part.gpus))}" if part.gpus and gpus else "CPU"
        rows.append(
            (
                part.display_name,
                part.node or node,
                devices,
                part.address if is_fixed else part.address.rpartition(":")[0],
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def component_configs(config: RLConfig, has_key: bool) -> dict[str, Any]:
    """Return each component's configuration by name. `has_key`: the servers require an API key."""
    common = config.model_dump(
        include={
            "model",
            "output_dir",
            "layout",
            "seed",
            "log_level",
            "log_interval",
            "max_steps",
            "max_async_level",
        }
    )
    own = config.model_dump(
        include={"clean", "resume", "ckpt", "weights", "weight_broadcast", "ranks_timeout"}
    )
    configs: dict[str, Any] = {}
    orchestrator = config.orchestrator.model_dump() | common | {"seq_len": config.seq_len}
    for tracker in ("wandb", "tensorboard"):
        orchestrator[tracker] = getattr(config, tracker) and getattr(config, tracker).model_dump()
    if config.inference is not None:
        servers = _server_configs(config, config.inference, has_key)
        configs |= servers
        orchestrator["client"]["base_url"] = [
            f"http://{node or _reachable_host(config.inference)}:{servers[name].server.port}/v1"
            for name, node in nodes_of_servers(config).items()
        ]
        if has_key:
            orchestrator["client"]["api_key_var"] = API_KEY_VARIABLE
    configs["orchestrator"] = OrchestratorRunConfig.model_validate(orchestrator)
    if config.trainer_nodes and isinstance(config.weight_broadcast, NcclConfig):
        own["weight_broadcast"] |= {"host": config.trainer_nodes[0]}
    configs["trainer"] = TrainerRunConfig.model_validate(config.trainer.model_dump() | common | own)
    return configs


def _reachable_host(inference: ServeConfig) -> str:
    host = inference.server.host
    return "localhost" if host in (*EVERYWHERE, *LOOPBACK) else host


def _server_configs(
    config: RLConfig, inference: ServeConfig, has_key: bool
) -> dict[str, InferenceConfig]:
    """Return the configurations of the inference servers by name.

    Raises ValueError if other machines can reach the servers and `has_key` is False.
    """
    server = inference.server
    if (config.inference_nodes or server.host not in (*EVERYWHERE, *LOOPBACK)) and not has_key:
        raise ValueError(
            f"inference.server.host {server.host}: control routes answer to loopback alone without a key; "
            f"give one with --inference.api-key or {API_KEY_VARIABLE}"
        )
    common = config.model_dump(include={"model", "seed", "log_level"})
    given = inference.model_dump() | beside_trainer(config) | common
    given["allowed_dirs"] = inference.allowed_dirs or [config.output_dir]
    configs = {}
    for i, (name, node) in enumerate(nodes_of_servers(config).items()):
        port = server.port + i if server.port else free_port()
        place = {"host": "0.0.0.0" if node else server.host, "port": port}
        configs[name] = InferenceConfig.model_validate(given | {"server": place})
    return configs


def names_of_servers(config: RLConfig) -> list[str]:
    count = config.inference_replicas
    return ["inference"] if count == 1 else [f"inference_{i}" for i in range(count)]


def gpus_of_servers(config: RLConfig) -> dict[str, list[int]]:
    """Return each inference server's GPUs. Raises ValueError if they cannot be divided equally."""
    ids = config.inference_gpu_ids
    names = names_of_servers(config)
    beside = len(names) // max(1, len(config.inference_nodes))  # servers per node
    if beside == 1 or not (config.inference_nodes or visible_gpus(ids, config)):
        return dict.fromkeys(names, ids)
    each, rest = divmod(len(ids), beside)
    if rest or not each:
        raise ValueError(
            f"inference_gpu_ids: {len(ids)} GPUs cannot be divided among {beside} servers (inference_replicas)"
        )
    return {name: ids[i % beside * each : (i % beside + 1) * each] for i, name in enumerate(names)}


def beside_trainer(config: RLConfig) -> dict[str, Any]:
    """Return a KV cache limit if server and trainer share a GPU and none is configured, else {}."""
    parts = (config.inference_gpu_ids, config.trainer_gpu_ids)
    server, trainer = (
        set(visible_gpus(ids, config).get("CUDA_VISIBLE_DEVICES", "").split(",")) for ids in parts
    )
    given = config.inference and config.inference.kv_cache_gib
    return {"kv_cache_gib": SHARED_GPU_GIB} if server & trainer - {""} and given is None else {}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def thread_environment(config: RLConfig) -> dict[str, str]:
    """Return the environment variables that set the number of threads of each component.

    OMP_NUM_THREADS divides the cores among the trainer's ranks and the inference servers.
    HONE_CORES is the number of all cores, for compiling the CPU kernels while the other processes
    wait.
    """
    servers = config.inference_replicas if config.inference is not None else 0
    count = len(config.trainer_gpu_ids) + servers
    if config.inference_nodes:
        count = max(len(config.trainer_gpu_ids), servers // len(config.inference_nodes))
    cores = machine.usable_cores()
    return {"OMP_NUM_THREADS": str(max(1, cores // count)), machine.CORES_VARIABLE: str(cores)}


def environments_of_ranks(
    count: int, nodes: int = 1, node: int = 0, meet: str = ""
) -> list[dict[str, str]]:
    """Return torchrun's environment variables for each process on a node.

    Args:
        count: processes per node.
        nodes: number of nodes.
        node: index of this node.
        meet: HOST:PORT of the first node; a free local port by default.
    """
    if count * nodes == 1:
        return [{}]
    host, _, port = (meet or f"127.0.0.1:{free_port()}").rpartition(":")
    meeting = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(count * nodes)}
    return [meeting | {"RANK": str(node * count + i), "LOCAL_RANK": str(i)} for i in range(count)]


def visible_gpus(ids: list[int] | None, config: RLConfig, node: str = "") -> dict[str, str]:
    """Return the environment variables that restrict a component to its GPUs.

    `ids` are indices among the visible GPUs of the component's node. A process on another node
    resolves them when it starts.
    """
    if ids is None or config.model.device == "cpu":
        return {}
    if node:
        return {machine.GPUS_VARIABLE: ",".join(map(str, ids))}
    devices = machine.usable_gpus()
    if not devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[i % len(devices)] for i in ids)}
