"""Record what Tinker's SDK sends to `hone tinker` and is answered, for test_tinker_replay.py.

    python -m tests.integration.tinker_traffic

Serves the tiny model, whose weights follow from a seed, behind a proxy that writes each call as a line
of tinker_traffic.jsonl.
"""

import base64
import contextlib
import json
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np

FILE = Path(__file__).with_suffix(".jsonl")
NAME = "tiny"  # of the model, in place of a directory
KEPT_HEADERS = ("content-type", "x-api-key")


def start_proxy(target: str, calls: list[dict]) -> ThreadingHTTPServer:
    """Forward requests to `target`; append what is sent and answered to `calls`."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {k: v for k, v in self.headers.items() if k.lower() in KEPT_HEADERS}
            call = {"method": self.command, "path": self.path, "headers": headers}
            call["body"] = base64.b64encode(body).decode()
            calls.append(call)
            found = httpx.request(
                self.command, target + self.path, headers=headers, content=body, timeout=60
            )
            call |= {"status": found.status_code}
            call["answer_type"] = found.headers.get("content-type", "")
            call["answer"] = base64.b64encode(found.content).decode()
            self.send_response(found.status_code)
            self.send_header("content-type", call["answer_type"])
            self.send_header("content-length", str(len(found.content)))
            self.end_headers()
            self.wfile.write(found.content)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def make_calls(url: str) -> None:
    """Make each kind of call once or twice, as recipes do."""
    import tinker
    from tinker import types

    from tests.integration.test_tinker import adam, draw_data, of_sdk

    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    rest = tinker.RestClient(base_url=url, api_key="tml-local")
    rest.get_server_capabilities().result()
    training = client.create_lora_training_client(NAME, rank=4, seed=0).result()
    draw = np.random.default_rng(0)
    for loss in ("cross_entropy", "importance_sampling", "ppo"):
        several = loss == "cross_entropy"
        passed = training.forward_backward(of_sdk(draw_data(draw, several=several), loss), loss)
        stepped = training.optim_step(adam(1e-2, clip=1.0))
        passed.result(), stepped.result()
    state = training.save_state("state").result().path
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([5, 9, 7, 11])
    asked = types.SamplingParams(max_tokens=8, seed=3, temperature=1.0, stop=[])
    sampler.sample(prompt, 3, asked).result()
    sampler.sample(prompt, 1, asked, include_prompt_logprobs=True).result()
    sampler.compute_logprobs(prompt).result()
    again = client.create_training_client_from_state_with_optimizer(state).result()
    again.forward(of_sdk(draw_data(draw)), "cross_entropy").result()
    with contextlib.suppress(tinker.RequestFailedError):
        again.forward(of_sdk(draw_data(draw)), "no_such_loss").result()
    again.forward(of_sdk(draw_data(draw)), "cross_entropy").result()
    rest.list_user_checkpoints().result()
    rest.get_training_run(training.model_id).result()
    rest.delete_checkpoint_from_tinker_path(state).result()
    client.close("success").result()


def main() -> None:
    import hone
    from tests.integration.test_tinker import MODEL, Server

    os.environ["TINKER_TELEMETRY"] = "0"
    calls: list[dict] = []
    with tempfile.TemporaryDirectory() as directory:
        session = hone.TrainingSession(MODEL, random_init=True, device="cpu")
        session.export_weights(Path(directory) / "model")
        server = Server(Path(directory), "--served-names", NAME)
        try:
            proxy = start_proxy(server.url, calls)
            make_calls(f"http://127.0.0.1:{proxy.server_port}")
            proxy.shutdown()
        finally:
            server.close()
        for call in calls:
            answer = base64.b64decode(call["answer"]).replace(directory.encode(), b"/models")
            call["answer"] = base64.b64encode(answer).decode()
    kept = [call for call in calls if not call["path"].endswith("session_heartbeat")]
    FILE.write_text("".join(json.dumps(call) + "\n" for call in kept))
    print(f"{len(kept)} calls in {FILE}")


if __name__ == "__main__":
    main()
