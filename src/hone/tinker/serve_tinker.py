"""`hone tinker`: load a model and serve Tinker's API until interrupted."""

import logging
import time

from hone import STARTED
from hone.config.lora_config import LoRAConfig
from hone.config.sections import LOOPBACK, OptimConfig, own_key
from hone.config.tinker_config import TinkerConfig
from hone.engine.cache_budget import plan_cache
from hone.engine.engine import Engine
from hone.inference.engine_service import EngineService
from hone.inference.event_loop import run_event_loop
from hone.inference.http_server import build_server, format_url
from hone.inference.socket_binding import bind_socket
from hone.models.device_memory import total_bytes
from hone.models.language_model import LanguageModel
from hone.models.lora import share_base
from hone.models.merged_weights import MergedWeights
from hone.process_report import write_report
from hone.session.frozen_base import FrozenBase
from hone.tinker.checkpoints import CheckpointStore
from hone.tinker.messages import message_class
from hone.tinker.routes import KEY_PREFIX, build_app
from hone.tinker.snapshot_samplers import MergedTurns, SamplerSlots, SnapshotSamplers
from hone.tinker.training_runs import TrainingRuns
from hone.trainer.memory_estimate import adapter_size, estimate_step, micro_batch_tokens

ASSUMED_RANK = 32  # of adapters, where memory is kept for them
log = logging.getLogger("hone.tinker")


def estimate_training_bytes(model: LanguageModel, adapters: int) -> int:
    """Return the bytes that a number of models in training need beside the frozen base."""
    weight = model.embed.weight
    itemsize, optim = weight.dtype.itemsize, OptimConfig()
    tokens = micro_batch_tokens(model.spec, itemsize, False, total_bytes(weight.device))
    lora = LoRAConfig(rank=ASSUMED_RANK)
    step = estimate_step(model.spec, lora, optim, tokens, itemsize, is_split=True)
    trained = itemsize * adapter_size(model.spec, lora)
    kept = trained + step.masters + step.moments + step.sums
    return adapters * kept + step.step_bytes


def serve_tinker(config: TinkerConfig) -> None:
    """Load the model and serve Tinker's API until interrupted.

    Raises ValueError if the model, the address or the directory cannot be used.
    """
    message_class("Datum")  # protobuf is there
    if config.model.numerics == "exact":
        raise ValueError(
            "model.numerics exact: adapters are merged for sampling and not for training; take fast"
        )
    api_key = config.api_key or own_key()
    if api_key is not None:
        api_key = api_key.removeprefix(KEY_PREFIX)
    host = config.server.host or ("127.0.0.1" if api_key is None else "0.0.0.0")
    if api_key is None and host not in LOOPBACK:
        log.warning("serving on %s without an API key: whoever reaches it can train here", host)
    sock = bind_socket(host, config.server.port)
    store = CheckpointStore(config.directory)
    store.delete_expired()
    keys = config.model.model_dump(exclude_unset=True, exclude={"name"})
    base = FrozenBase(config.model.name, seed=config.seed, **keys)
    merged = MergedWeights(base.loaded.model) if config.merge else None
    model = share_base(base.loaded.model) if merged is None else merged.model
    reserved = estimate_training_bytes(model, config.training_adapters)
    sizes = plan_cache(config, model, config.max_model_len, reserved)
    base.engine = Engine(model, max_model_len=config.max_model_len, **sizes)
    service = EngineService(base.engine)
    names = list(dict.fromkeys([config.model.name, *config.served_names]))

    snapshots: SnapshotSamplers = (
        SamplerSlots(service, config.sampling_adapters)
        if merged is None
        else MergedTurns(service, merged)
    )
    runs = TrainingRuns(base, service, store, names, snapshots)
    server = build_server(build_app(runs, api_key))
    sock.listen(2048)
    url = format_url(host, sock.getsockname()[1])
    write_report(url=url)
    seconds = time.perf_counter() - STARTED
    log.info("Serving %s at %s (ready after %.1f s)", ", ".join(names), url, seconds)
    key = KEY_PREFIX + ("local" if api_key is None else "<API KEY>")
    log.info("For clients: export TINKER_BASE_URL=%s TINKER_API_KEY=%s", url, key)
    service.run_beside(server.serve(sockets=[sock]), run_event_loop)
