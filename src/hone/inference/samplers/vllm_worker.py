"""Extension of vLLM's GPU workers (`--worker-extension-cls`) that loads weights from another
process's memory.

It runs in vLLM's Python, which has torch and, of Hone, only this package's files.
"""

from typing import Any

import torch

from hone.transport.gpu_memory import open_tensors


class TakesWeights:
    reload_weights: Any  # the worker's own method

    def hone_take_weights(self, words: dict[str, Any]) -> None:
        """Load tensors that another process on this machine shares."""
        self.reload_weights(weights_iterator=iter(open_tensors(words).items()))
        torch.cuda.synchronize()
