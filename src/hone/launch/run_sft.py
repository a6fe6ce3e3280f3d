"""`sft`: the trainer, with evaluation between steps if configured."""

from hone import machine
from hone.config.sft_config import SFTConfig


def main(config: SFTConfig) -> None:
    machine.grow_gpu_segments()
    from hone.trainer.sft.train import main as train

    if config.eval is None:
        return train(config)
    from hone.evals.in_training import Evaluation

    train(config, Evaluation(config.eval, config.seed))
