"""Weights from the trainer's memory to the servers', over NCCL between GPUs and Gloo between CPUs. No file is written.

    server ── "version V, please" ─► store of the trainer
    trainer, Sender's thread ── snapshot of V, many tensors at once ─► server      a pair of processes each, kept

A server asks when it wants to: one that was started again is given the current weights like any other, while training
goes on. The snapshot is replaced when nobody is being sent it.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch

from hone.config.sections import LOOPBACK
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer
from hone.transport.files import Superseded

distributed: Any = torch.distributed
TIMEOUT, CONNECT = timedelta(seconds=120), timedelta(seconds=10)  # of one transfer; until the other side is there
LOOK = 0.003  # seconds between looks for who asks
PORTION = 2**28  # bytes of one transfer, about: the receive buffer, where the receiving model has another dtype


class Sender:
    """The trainer's side, from `start` to `stop`; `publish` replaces what is sent."""

    def __init__(
        self, host: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, log: logging.Logger
    ) -> None:
        self.host, self.device, self.log, self._dtype = host, device, log, dtype
        self._snapshot = Transformer(spec).to(device, dtype)
        self._version = -1
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}  # the newest version that each server has
        self._pairs: dict[str, Any] = {}
        # The store would listen everywhere: it is given a socket that does not.
        try:
            self._socket = socket.create_server((host, 0))
        except OSError as error:
            raise ValueError(f"weight_broadcast.host {host}: cannot be listened on: {error.strerror}") from None
        self.port: int = self._socket.getsockname()[1]
        self._store = distributed.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, timeout=TIMEOUT,
            master_listen_fd=self._socket.detach(),
        )  # fmt: skip
        if host not in LOOPBACK:
            log.warning("Sending weights from %s: whoever reaches this address can have them", self.source)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(5.0)
        for group in self._pairs.values():
            group.abort()  # without the other side, which may be gone

    @property
    def source(self) -> str:
        return f"{self.host}:{self.port}"

    @torch.no_grad()
    def publish(self, model: Transformer, version: int) -> int:
        """Makes this the version that is sent; returns its bytes."""
        with self._lock:
            for mine, theirs in zip(self._snapshot.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the other thread has a stream of its own
            self._version = version
        return sum(p.numel() * p.element_size() for p in self._snapshot.parameters())

    def finish(self, is_waited_for: Callable[[], bool]) -> None:
        """Waits until the servers that took versions before have the last one, while anybody wants it."""
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while any(version < self._version for version in self._taken.values()) and is_waited_for():
            if time.monotonic() > deadline:
                self.log.warning("Not every server has taken version %d", self._version)
                return
            time.sleep(LOOK)

    def _serve(self) -> None:
        while not self._is_over.wait(LOOK):
            while self._store.queue_len("asks"):
                asked = json.loads(self._store.queue_pop("asks"))
                try:
                    self._answer(**asked)
                except Exception as error:  # it died, or the line did; it will ask again
                    self.log.warning("Version %d did not reach server %s: %s", asked["version"], asked["name"], error)
                    self._pairs.pop(asked["name"], None)

    def _answer(self, name: str, number: int, version: int) -> None:
        with self._lock:
            self._store.set(f"answer/{name}/{number}", str(self._version))
            if version != self._version:
                return
            if name not in self._pairs:
                self._pairs[name] = pair(self._store, name, 0, self.device)
            for part in portions(self._snapshot, self._dtype):
                move(self._pairs[name], "send", [parameter.detach() for parameter in part])
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            self._taken[name] = version


class Receiver:
    """A server's side: pairs with the trainers that it was sent weights by."""

    def __init__(self) -> None:
        self._name = f"{socket.gethostname()}-{time.monotonic_ns()}"
        self._known: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._asked = 0

    @torch.no_grad()
    def receive(self, source: str, version: int, dtype: torch.dtype, model: Transformer) -> None:
        """Fills a model with a version. Raises Superseded, and ValueError where the trainer cannot be reached."""
        device = model.embed.weight.device
        try:
            store, group = self._known.get((source, device.type), (None, None))
            if store is None:
                host, _, port = source.rpartition(":")
                store = distributed.TCPStore(host, int(port), is_master=False, timeout=CONNECT)
                store.set_timeout(TIMEOUT)
            self._asked += 1
            store.queue_push("asks", json.dumps({"name": self._name, "number": self._asked, "version": version}))
            newest = int(store.get(f"answer/{self._name}/{self._asked}"))
            if newest != version:
                raise Superseded(f"version {version} was asked for, the trainer has {newest}")
            group = group or pair(store, self._name, 1, device)
            for part in portions(model, dtype):
                arrived = [p.detach() if p.dtype == dtype else torch.empty_like(p, dtype=dtype) for p in part]
                move(group, "recv", arrived)
                for parameter, value in zip(part, arrived, strict=True):
                    if parameter.dtype != dtype:
                        parameter.copy_(value)
        except (RuntimeError, distributed.DistError) as error:
            self._known.pop((source, device.type), None)
            raise ValueError(f"weights could not be had from {source}: {str(error).splitlines()[0]}") from None
        self._known = {(source, device.type): (store, group)}  # of the present run alone


def portions(model: Transformer, dtype: torch.dtype) -> Iterator[list[torch.nn.Parameter]]:
    """The weights in the order and the portions that both sides know, of up to PORTION bytes in this dtype."""
    part: list[torch.nn.Parameter] = []
    size = 0
    for parameter in model.parameters():
        part.append(parameter)
        size += parameter.numel() * dtype.itemsize
        if size >= PORTION:
            yield part
            part, size = [], 0
    if part:
        yield part


def move(group: Any, what: Literal["send", "recv"], tensors: list[torch.Tensor]) -> None:
    """To, or from, the other of a pair: at once over NCCL."""
    one, other = getattr(group, what), 1 - group.rank()
    if group.supports_coalescing:
        group._start_coalescing()
        for tensor in tensors:
            one([tensor], other, 0)
        group._end_coalescing().wait()
    else:
        for tensor in tensors:
            one([tensor], other, 0).wait(TIMEOUT)


def pair(store: Any, name: str, rank: int, device: torch.device) -> Any:
    """A process group of the trainer (rank 0) and one server (rank 1)."""
    named = distributed.PrefixStore(f"pair/{name}", store)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return distributed.ProcessGroupNCCL(named, rank, 2, options)
    return distributed.ProcessGroupGloo(named, rank, 2, CONNECT)  # else one that is gone keeps others waiting
