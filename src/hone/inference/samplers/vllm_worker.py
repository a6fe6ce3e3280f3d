"""Extension of vLLM's GPU workers that loads weights from another process's memory.

vLLM imports it (`--worker-extension-cls`) in its own Python environment, which has torch and the
package `hone`, but not necessarily Hone's other dependencies.
"""

from typing import Any

import torch

from hone.transport.gpu_memory import open_tensors


class TakesWeights:
    reload_weights: Any  # the worker's own method

    def hone_take_weights(self, words: dict[str, Any]) -> None:
        """Load weights from the GPU memory of another process.

        `words` describes the memory: its CUDA IPC handle and the layout of the tensors.
        """
        self.reload_weights(weights_iterator=iter(open_tensors(words).items()))
        torch.cuda.synchronize()
