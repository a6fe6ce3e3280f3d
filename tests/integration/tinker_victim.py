"""A client whose server is killed: `python -m tests.integration.tinker_victim URL BASE [STATE]`.

Prints a line of JSON once it has saved a state and sent more work, and another one with the error.
"""

import json
import sys

import numpy as np
import tinker

from tests.integration.test_tinker import adam, draw_data, logprobs_of, of_sdk


def main():
    url, base, *state = sys.argv[1:]
    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    if state:
        training = client.create_training_client_from_state_with_optimizer(*state).result()
    else:
        training = client.create_lora_training_client(base, rank=4, seed=0).result()
    data = of_sdk(draw_data(np.random.default_rng(8)))

    def score():
        found = logprobs_of(training.forward(data, "cross_entropy").result())
        return [row.tolist() for row in found]

    before = score()
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam(1e-2)).result()
    after, path = score(), training.save_state("kept").result().path
    for _ in range(20):
        training.forward_backward(data, "cross_entropy")
    step = training.optim_step(adam(1e-2))
    print(json.dumps({"before": before, "after": after, "path": path}), flush=True)
    try:
        step.result()
        print(json.dumps({"error": ""}), flush=True)
    except Exception as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
