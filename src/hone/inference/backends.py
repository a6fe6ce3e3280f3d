"""Backends of a server: Hone's engine in this or a separate process (engine_process.py), or vLLM.

with backend(config) as opened:
    served = opened.wait()  # returns once the model is loaded
    opened.run(program)     # runs the coroutine that serves the model
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from hone import machine
from hone.config.inference_config import InferenceConfig
from hone.config.sections import BACKEND_LOST
from hone.inference.event_loop import run_event_loop as run_loop
from hone.inference.served_model import Served, find_allowed_directories

log = logging.getLogger("hone.inference")
POLL_SECONDS = 0.2  # seconds between checks that vLLM is alive


def takes_vllm(config: InferenceConfig) -> bool:
    """Return True if the server's backend is vLLM.

    With `config.backend` "auto", vLLM is used if the configuration needs it, or if Hone does not
    support the model and vLLM is installed. Raises ValueError if exact numerics are requested with
    vLLM.
    """
    is_wanted = config.backend == "vllm" or (config.backend == "auto" and config.needs_vllm)
    if is_wanted and config.model.numerics == "exact":
        raise ValueError(
            "model.numerics exact: vLLM sums in another order; use --backend hone or numerics fast"
        )
    if config.backend != "auto" or is_wanted:
        return is_wanted
    from hone.models.families import is_known
    from hone.models.model_directory import resolve_model
    from hone.models.spec import read_model_config

    return not is_known(read_model_config(resolve_model(config.model.name))) and is_installed(
        config
    )


def is_installed(config: InferenceConfig) -> bool:
    from hone.inference.samplers.vllm_process import find_installation

    try:
        return bool(find_installation(config.vllm_python or sys.executable))
    except ValueError:
        return False  # the model will be refused, with what to do


def is_apart(config: InferenceConfig) -> bool:
    """Return True if Hone's engine runs in a process of its own."""
    if config.engine_apart is None:
        return config.model.device != "cpu" and bool(machine.usable_gpus())
    return config.engine_apart


class Embedded:
    """Hone's engine in this process, with the HTTP program in another thread."""

    def __init__(self, config: InferenceConfig) -> None:
        from hone.engine.cache_budget import plan_cache
        from hone.engine.engine import Engine
        from hone.engine.warm_up import compile_kernels, describe_rehearsal, plan_captures
        from hone.inference.engine_service import EngineService
        from hone.inference.samplers.embedded import EmbeddedSampler
        from hone.kernels import fingerprints
        from hone.kernels.gpu.compiling import KeptKernels, together
        from hone.models.loading import load_configured

        loaded = load_configured(config.model, seed=config.seed)
        length = config.max_model_len
        sizes = plan_cache(config, loaded.model, length)
        engine = Engine(loaded.model, max_model_len=length, stand_in=True, **sizes)
        kept = KeptKernels(describe_rehearsal(engine))
        if engine.graphs is None or not kept.are_there():
            with together():
                compile_kernels(engine, engine.max_batch_size)
                fingerprints.rehearse(loaded.model.embed.weight)
            if engine.graphs is not None:
                kept.note()
        for name, directory in config.adapters.items():
            if name == config.model.name:
                raise ValueError(f"adapters: {name!r} is the name of the model itself")
            engine.load_adapter(name, directory)
        self.service = EngineService(engine)
        self.service.idle_work = plan_captures(engine)  # the server answers meanwhile
        self.sampler = EmbeddedSampler(self.service, config.model.implementation)
        self.served = Served(
            self.sampler, loaded.tokenizer, config.model.name, find_allowed_directories(config)
        )

    def __enter__(self) -> "Embedded":
        return self

    def wait(self) -> Served:
        return self.served

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        self.service.run_beside(program, run_loop)


class Vllm:
    """Backend that starts a vLLM process; Hone's HTTP routes forward their requests to vLLM."""

    def __init__(self, config: InferenceConfig) -> None:
        from hone.inference.samplers.vllm import VllmSampler
        from hone.inference.samplers.vllm_process import VllmProcess
        from hone.models.model_directory import resolve_model
        from hone.text.tokenizer import Tokenizer

        if config.adapters:
            raise ValueError("adapters: those are served by Hone's engine alone (backend hone)")
        directory = resolve_model(config.model.name)
        tokenizer = Tokenizer.for_model(directory, config.model)
        self.process = VllmProcess(config, directory)
        self.sampler = VllmSampler(self.process, config.max_batch_size)
        self.served = Served(
            self.sampler, tokenizer, config.model.name, find_allowed_directories(config)
        )

    def __enter__(self) -> "Vllm":
        # While vLLM starts.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.process.__enter__()
        return self

    def wait(self) -> Served:
        return self.served

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        """Run `program`, the HTTP server. If vLLM ends first, exit with code BACKEND_LOST."""

        async def run_both() -> None:
            await self.sampler.open()
            serving = asyncio.ensure_future(program)
            while not serving.done():
                if self.process.process.poll() is not None:
                    log.error("vLLM %s; this server ends too", self.process.describe_failure())
                    self.process.__exit__()
                    # At once, so that clients see the failure and retry elsewhere.
                    os._exit(BACKEND_LOST)
                await asyncio.wait([serving], timeout=POLL_SECONDS)
            await self.sampler.close()
            await serving

        asyncio.run(run_both())

    @staticmethod
    def run_headless(config: InferenceConfig) -> None:
        """Run the vLLM engines of a server whose HTTP routes are on another machine.

        Raises ValueError when vLLM ends.
        """
        from hone.inference.samplers.vllm_process import VllmProcess
        from hone.models.model_directory import resolve_model

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with VllmProcess(config, resolve_model(config.model.name)) as process:
            process.process.wait()
            raise ValueError(f"vLLM {process.describe_failure()}")
