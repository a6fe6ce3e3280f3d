"""Table of the commands that read a configuration.

Per command: import paths of the configuration class and of the function to run, a summary.
"""

import importlib
from typing import Any

COMMANDS = {  # name: (configuration, what runs it, summary)
    "sft": (
        "hone.config.sft_config:SFTConfig",
        "hone.launch.run_sft:main",
        "Train on conversations: loss on what the assistant says.",
    ),
    "rl": (
        "hone.config.rl_config:RLConfig",
        "hone.launch.run_rl:main",
        "Train on rewards: sample, score, step, repeat.",
    ),
    "vf-rl": (
        "hone.config.vf_rl_config:VfRLConfig",
        "hone.launch.rl_trainer:main",
        "Train on rewards, from a file of verifiers' RLTrainer: LoRA on one device.",
    ),
    "trainer": (
        "hone.config.rl_config:TrainerRunConfig",
        "hone.trainer.rl.train:main",
        "The trainer of an RL run as a process of its own.",
    ),
    "orchestrator": (
        "hone.config.rl_config:OrchestratorRunConfig",
        "hone.orchestrator.run:main",
        "The orchestrator of an RL run as a process of its own.",
    ),
    "inference": (
        "hone.config.inference_config:InferenceConfig",
        "hone.inference.serve:serve_model",
        "Serve a model behind the OpenAI chat API.",
    ),
    "tinker": (
        "hone.config.tinker_config:TinkerConfig",
        "hone.tinker.serve_tinker:serve_tinker",
        "Serve Tinker's API: clients train adapters and sample here (`hone tinker`).",
    ),
    "export": (
        "hone.config.export_config:ExportConfig",
        "hone.trainer.export:export_model",
        "Write a checkpoint as a model directory (`hone export`).",
    ),
    "probe": (
        "hone.config.probe_config:ProbeConfig",
        "hone.launch.numerics_probe:main",
        "Compare the logprobs of sampling and of training, bit by bit (`hone probe`).",
    ),
}


def import_object(path: str) -> Any:
    """Import and return what `MODULE:NAME` refers to."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
