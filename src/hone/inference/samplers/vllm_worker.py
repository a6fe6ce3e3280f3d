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
        """Load tensors that another process on this machine shares."""
        self.reload_weights(weights_iterator=iter(open_tensors(words).items()))
        torch.cuda.synchronize()
