"""A second implementation of the sampler's door: transformers' generate, one batch of like requests at a time.

usage: python transformers_sampler.py --model.name DIR --server.port 0
"""

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import uvicorn
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from hone.child_process import end_with_parent
from hone.inference.app import build_app
from hone.inference.samplers.base import Sampler
from hone.inference.served_model import Served
from hone.inference.socket_binding import bind_socket
from hone.records import Completion, ContextFull
from hone.text.tokenizer import Tokenizer
from hone.transport.transports import make_receiver


class TransformersSampler(Sampler):
    max_context = vocab_size = None
    is_paused = ends = False
    version = completions = 0

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.max_context, self.vocab_size = (
            self.model.config.max_position_embeddings,
            self.model.config.vocab_size,
        )
        self.waiting, self.working, self.thread, self.open = (
            [],
            None,
            ThreadPoolExecutor(1),
            asyncio.Event(),
        )
        self.open.set()

    def on_thread(self, work, *arguments):
        return asyncio.wrap_future(self.thread.submit(work, *arguments))

    async def generate(self, request):
        if len(request.prompt_ids) >= self.max_context:
            raise ContextFull(
                f"maximum context length is {self.max_context} tokens, there are {len(request.prompt_ids)}"
            )
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        if self.working is None or self.working.done():
            self.working = asyncio.create_task(self.work())
        return await future

    async def work(self):
        await asyncio.sleep(0.01)  # for those who come together
        while self.waiting:
            await self.open.wait()
            like = [one for one in self.waiting if key(one[0]) == key(self.waiting[0][0])]
            self.waiting = [one for one in self.waiting if one not in like]
            done = await self.on_thread(self.batch, [request for request, _ in like])
            for (_, future), completion in zip(like, done):
                if not future.done():
                    future.set_result(completion)

    @torch.no_grad()
    def batch(self, requests):
        how, longest = requests[0].sampling, max(len(one.prompt_ids) for one in requests)
        padded = [[-1] * (longest - len(one.prompt_ids)) + one.prompt_ids for one in requests]
        ids, drawing = torch.tensor(padded), {"do_sample": False}
        if how.temperature:
            drawing = {"do_sample": True, "temperature": how.temperature, "top_k": 0}
        torch.manual_seed(how.seed % 2**63)
        found = self.model.generate(
            ids.clamp(min=0),
            attention_mask=(ids >= 0).long(),
            pad_token_id=0,
            output_logits=True,
            max_new_tokens=min(how.max_tokens, self.max_context - longest),
            return_dict_in_generate=True,
            eos_token_id=None if how.ignore_eos else sorted(requests[0].stop_ids),
            stopping_criteria=StoppingCriteriaList(
                [lambda ids, _: torch.full((len(ids),), self.ends)]
            ),
            **drawing,
        )
        new = found.sequences[:, longest:]
        logprobs = torch.log_softmax(torch.stack(found.logits, 1) / (how.temperature or 1.0), -1)
        own = logprobs.gather(2, new[:, :, None]).squeeze(2)
        self.completions += len(requests)
        return [self.cut(*one) for one in zip(requests, new.tolist(), own.tolist())]

    def cut(self, request, ids, logprobs):
        stops = frozenset() if request.sampling.ignore_eos else request.stop_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        reason = "stop" if end is not None else "abort" if self.ends else "length"
        return Completion(ids[:end], logprobs[:end], [self.version] * len(ids[:end]), reason)

    async def score(self, sequences, temperature):
        if max(map(max, sequences)) >= self.vocab_size:
            raise ValueError("ids: beyond the vocabulary")
        return [await self.on_thread(self.logprobs, ids, temperature) for ids in sequences]

    @torch.no_grad()
    def logprobs(self, ids, temperature):
        found = torch.log_softmax(self.model(torch.tensor([ids[:-1]])).logits[0] / temperature, -1)
        return found.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()

    async def find_likeliest(self, ids, number):
        raise ValueError("echo: not here")

    async def update_weights(self, place, version, message):
        await self.on_thread(self.take, place, version, message)
        return await self.describe_state()

    @torch.no_grad()
    def take(self, place, version, message):
        weights = dict(self.model.named_parameters())
        make_receiver(message["type"]).receive_version(message, version, place, weights)
        self.version = version

    async def describe_state(self, each=False):
        own = {
            "version": self.version,
            "checksum": None,
            "dtype": "float32",
            "completions": self.completions,
        }
        return own | {"device": "transformers on CPU"}

    async def pause(self, mode):
        self.is_paused, self.ends = True, mode == "abort"
        self.open.clear()
        await self.on_thread(lambda: None)  # until what runs is over

    async def resume(self):
        self.is_paused = self.ends = False
        self.open.set()

    async def read_metrics(self):
        return {}


def key(request):
    how = request.sampling
    return how.temperature, how.max_tokens, how.ignore_eos, request.stop_ids


async def main(directory, port):
    app = build_app(
        Served(TransformersSampler(directory), Tokenizer(Path(directory)), directory, [Path("/")])
    )
    sock = bind_socket("127.0.0.1", port)
    sock.listen(2048)
    print(f"Serving {directory} at http://127.0.0.1:{sock.getsockname()[1]}/v1", flush=True)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve(sockets=[sock])


if __name__ == "__main__":
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn ends, and raises it once more
    asyncio.run(main(sys.argv[2], int(sys.argv[4])))
