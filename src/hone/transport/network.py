"""Weights from the trainer's memory to the servers', over NCCL between GPUs and Gloo between CPUs. No file is written.

    server ── "version V, please" ─► store of the trainer
    trainer, Sender's thread ── snapshot of V, many tensors at once ─► server      a pair of processes each, kept
    on one GPU: the trainer waits while the server copies out of the snapshot (gpu_memory.py)

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
from pathlib import Path
from typing import Any, Literal

import torch

from hone.config.sections import LOOPBACK
from hone.transport.delivery import Message, Superseded
from hone.transport.gpu_memory import Owned, gpu_of, opened
from hone.transport.weights import Receiver, Sender, Tensors

distributed: Any = torch.distributed
TIMEOUT, CONNECT = timedelta(seconds=120), timedelta(seconds=10)  # of one transfer; until the other side is there
COPIED = timedelta(seconds=20)  # in which a server on the same GPU has to copy the weights
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOOK = 0.003  # seconds between looks for who asks
PORTION = 2**28  # bytes of one transfer, about: the receive buffer, where the receiving model has another dtype


class NetworkSender(Sender):
    """Listens while it is entered; `send` replaces what servers get who ask."""

    def __init__(self, host: str, log: logging.Logger) -> None:
        self.host, self.log = host, log
        self._snapshot: dict[str, torch.Tensor] = {}
        self._version = -1
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}  # the newest version that each server has
        self._pairs: dict[str, Any] = {}
        self._owned: Owned | None = None  # what the snapshot lies in, on a GPU
        self._readers: set[str] = set()  # servers that have it open
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="sender", daemon=True)

    def __enter__(self) -> "NetworkSender":
        try:
            sock = socket.create_server((self.host, 0))
        except OSError as error:
            raise ValueError(f"weight_broadcast.host {self.host}: cannot be listened on: {error.strerror}") from None
        self.source = f"{self.host}:{sock.getsockname()[1]}"
        # The store would listen everywhere: it is given a socket that does not.
        self._store = distributed.TCPStore(
            self.host, sock.getsockname()[1], is_master=True, wait_for_workers=False, timeout=TIMEOUT,
            master_listen_fd=sock.detach(),
        )  # fmt: skip
        if self.host not in LOOPBACK:
            self.log.warning("Sending weights from %s: whoever reaches this address can have them", self.source)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(5.0)
        for group in self._pairs.values():
            group.abort()  # without the other side, which may be gone

    @property
    def message(self) -> Message:
        dtype = next(iter(self._snapshot.values())).dtype
        gpu = {"gpu": gpu_of(self._device)} if self._owned is not None else {}
        return {"type": "nccl", "source": self.source, "dtype": str(dtype).removeprefix("torch."), **gpu}

    @torch.no_grad()
    def send(self, version: int, tensors: Tensors, place: Path) -> int:
        with self._lock:
            device = next(iter(tensors.values())).device
            if not self._snapshot and gpu_of(device):
                self._owned = Owned(tensors, device)
                self._snapshot = self._owned.tensors
            self._snapshot = self._snapshot or {name: torch.empty_like(one) for name, one in tensors.items()}
            torch._foreach_copy_(list(self._snapshot.values()), list(tensors.values()))
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the other thread has a stream of its own
            self._version = version
        return sum(one.numel() * one.element_size() for one in self._snapshot.values())

    @property
    def _device(self) -> torch.device:
        return next(iter(self._snapshot.values())).device

    def finish(self, is_waited_for: Callable[[], bool]) -> None:
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

    def _answer(self, name: str, number: int, version: int, shares: bool = False) -> None:
        with self._lock:
            self._store.set(f"answer/{name}/{number}", str(self._version))
            if version != self._version:
                return
            if shares and self._owned is not None:
                if name not in self._readers:
                    self._store.set(f"memory/{name}", json.dumps(self._owned.words()))
                    self._readers.add(name)
                self._store.wait([f"copied/{name}/{number}"], COPIED)
            else:
                if name not in self._pairs:
                    self._pairs[name] = pair(self._store, name, 0, self._device)
                for part in portions(self._snapshot):
                    move(self._pairs[name], "send", part)
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
            self._taken[name] = version


class NetworkReceiver(Receiver):
    """Pairs with the trainers that it was sent weights by."""

    def __init__(self) -> None:
        self._name = f"{socket.gethostname()}-{time.monotonic_ns()}"
        self._known: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._asked = 0

    @torch.no_grad()
    def receive(self, message: Message, version: int, place: Path, into: Tensors) -> None:
        source, dtype = message["source"], DTYPES[message["dtype"]]
        device = next(iter(into.values())).device
        try:
            store, group = self._known.get((source, device.type), (None, None))
            if store is None:
                host, _, port = source.rpartition(":")
                store = distributed.TCPStore(host, int(port), is_master=False, timeout=CONNECT)
                store.set_timeout(TIMEOUT)
            self._asked += 1
            shares = device.type == "cuda" and message.get("gpu") == gpu_of(device)
            ask = {"name": self._name, "number": self._asked, "version": version, "shares": shares}
            store.queue_push("asks", json.dumps(ask))
            newest = int(store.get(f"answer/{self._name}/{self._asked}"))
            if newest != version:
                raise Superseded(f"version {version} was asked for, the trainer has {newest}")
            if shares:
                group = group or opened(json.loads(store.get(f"memory/{self._name}")))
                torch._foreach_copy_(list(into.values()), [group[name] for name in into])
                torch.cuda.current_stream(device).synchronize()
                store.set(f"copied/{self._name}/{self._asked}", "1")
            else:
                group = group or pair(store, self._name, 1, device)
                for part in portions(into, dtype):
                    arrived = [one if one.dtype == dtype else torch.empty_like(one, dtype=dtype) for one in part]
                    move(group, "recv", arrived)
                    for tensor, value in zip(part, arrived, strict=True):
                        if tensor.dtype != dtype:
                            tensor.copy_(value)
        except (RuntimeError, distributed.DistError) as error:
            self._known.pop((source, device.type), None)
            raise ValueError(f"weights could not be had from {source}: {str(error).splitlines()[0]}") from None
        self._known = {(source, device.type): (store, group)}  # of the present run alone


def portions(tensors: Tensors, dtype: torch.dtype | None = None) -> Iterator[list[torch.Tensor]]:
    """The tensors in the order and the portions that both sides know, of up to PORTION bytes in this dtype, or their
    own."""
    part: list[torch.Tensor] = []
    size = 0
    for _, tensor in sorted(tensors.items()):
        part.append(tensor)
        size += tensor.numel() * (dtype or tensor.dtype).itemsize
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
