"""What is added to each worker of a vLLM on GPUs (`--worker-extension-cls`): weights out of our process's memory.

It runs in vLLM's Python, which has torch and nothing of ours but this package's files.
"""

from typing import Any

import torch

from hone.transport.gpu_memory import open_tensors


class TakesWeights:
    reload_weights: Any  # the worker's own

    def hone_take_weights(self, words: dict[str, Any]) -> None:
        """Loads what another process on this machine has at that place, as a checkpoint's tensors."""
        self.reload_weights(weights_iterator=iter(open_tensors(words).items()))
        torch.cuda.synchronize()
