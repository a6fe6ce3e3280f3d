"""Send weights from the trainer's memory to the servers' memory, without files.

    to a CPU or another machine, over Gloo or NCCL, one process group per server:
        server ── request for version V ─► TCPStore of the trainer
        trainer, Sender's thread ── snapshot of V, in few large transfers ─► server

    between GPUs of one machine:
        server ── request for the memory handle, once ─► TCPStore of the trainer; the server then copies the snapshot

Any process that reaches the port can read and write the store. Therefore trainer and servers share
a secret of the run, which a server receives with the delivery. Names of the store's keys are
derived from this secret, and every message is signed with it (`Secret`). Messages without a valid
signature are ignored.

A server can connect at any time: a restarted server gets the current weights while training
continues. The trainer replaces the snapshot when no server receives or reads it (`Stamp`).
"""

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from hone.transport.delivery import Message, Superseded
from hone.transport.gpu_memory import (
    NONE,
    Layout,
    Owned,
    Stamp,
    StampReader,
    gpu_of,
    layout_of,
    machine_of,
    map_memory,
    tensors_in,
)
from hone.transport.weight_transport import Arrived, Receiver, Sender, Tensors, ignore_arrivals

distributed: Any = torch.distributed
log = logging.getLogger("hone.inference")
# Seconds per transfer; until the peer connects.
TIMEOUT = timedelta(seconds=120)
CONNECT = timedelta(seconds=10)
# Seconds that the sender waits for a request before it waits again; torch warns each time.
IDLE = timedelta(days=20)
COPY_SECONDS = 20.0  # seconds in which a server of this machine has to copy the weights
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DIGEST_CHARACTERS = 64  # characters of a signature
SEND, SHOW, TAKEN = "send", "show", "taken"  # requests of a server
POLL_SECONDS = 0.003  # seconds between checks of who has loaded a version
PORTION_BYTES = 2**27  # bytes per transfer, about, and of each of the two buffers


class Secret:
    """A shared secret that signs messages exchanged through a store."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.prefix = self._compute_digest("keys")[:32]

    def key_name(self, key: str) -> str:
        """Return the unguessable name of a store key."""
        return f"{self.prefix}/{key}"

    def sign_message(self, key: str, text: str) -> str:
        """Return a signed message for a store key."""
        return f"{self._compute_digest(key, text)}{text}"

    def verify_message(self, key: str, signed: str | bytes) -> str:
        """Return the text of a message. Raises PermissionError unless it was signed for this key."""
        try:
            text = signed.decode() if isinstance(signed, bytes) else signed
        except UnicodeDecodeError:
            text = ""
        if not hmac.compare_digest(
            text[:DIGEST_CHARACTERS], self._compute_digest(key, text[DIGEST_CHARACTERS:])
        ):
            raise PermissionError("a message that does not have the run's signature")
        return text[DIGEST_CHARACTERS:]

    def _compute_digest(self, *parts: str) -> str:
        return hmac.new(self.key, "\0".join(parts).encode(), "sha256").hexdigest()


class NetworkSender(Sender):
    """Sender that answers the servers' requests while it is entered as a context manager.

    Servers receive a snapshot of the weights; each call of `send_version` replaces this snapshot.
    """

    def __init__(self, host: str, log: logging.Logger) -> None:
        self.host = host
        self.log = log
        self.secret = Secret(secrets.token_bytes(32))
        self._snapshot: Owned | None = None
        self._stamp = Stamp()  # the version of the snapshot
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}  # newest version of each server
        self._pairs: dict[str, Any] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve_requests, name="sender", daemon=True)

    def __enter__(self) -> "NetworkSender":
        try:
            sock = socket.create_server((self.host, 0))
        except OSError as error:
            raise ValueError(
                f"weight_broadcast.host {self.host}: cannot be listened on: {error.strerror}"
            ) from None
        self.source = f"{self.host}:{sock.getsockname()[1]}"
        # The store would listen on all addresses; it gets a bound socket.
        self._store = distributed.TCPStore(
            self.host,
            sock.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=IDLE,
            master_listen_fd=sock.detach(),
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        # Readers finish before the snapshot is gone.
        with self._stamp.change_version(NONE, COPY_SECONDS):
            pass
        port = int(self.source.rpartition(":")[2])
        # Wakes the thread.
        distributed.TCPStore(self.host, port, is_master=False, timeout=CONNECT).queue_push(
            self.secret.key_name("asks"), ""
        )
        self._thread.join(5.0)
        for group in self._pairs.values():
            group.abort()  # without the peer, which may be gone

    @property
    def delivery_message(self) -> Message:
        assert self._snapshot is not None
        dtype = self._snapshot.layout[0][1]
        device = self._snapshot.memory.device
        gpu = {"gpu": gpu_of(device), "machine": machine_of()} if device.type == "cuda" else {}
        return {
            "type": "nccl",
            "source": self.source,
            "dtype": dtype,
            "secret": self.secret.key.hex(),
            **gpu,
        }

    @torch.no_grad()
    def send_version(self, version: int, tensors: Tensors, place: Path) -> int:
        with self._lock:
            if self._snapshot is None:
                self._snapshot = Owned(tensors, next(iter(tensors.values())).device)
            with self._stamp.change_version(version, COPY_SECONDS) as is_alone:
                if not is_alone:
                    said = "Version %d replaces one that somebody has been reading for more than %.0f s"
                    self.log.warning(said, version, COPY_SECONDS)
                torch._foreach_copy_(
                    [self._snapshot.tensors[name] for name in tensors], list(tensors.values())
                )
                if self._snapshot.memory.is_cuda:
                    # Other transfers have their own streams.
                    torch.cuda.current_stream().synchronize()
        return sum(one.numel() * one.element_size() for one in tensors.values())

    def wait_for_receivers(self, is_waited_for: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while (
            any(version < self._stamp.version for version in self._taken.values())
            and is_waited_for()
        ):
            if time.monotonic() > deadline:
                self.log.warning("Not every server has taken version %d", self._stamp.version)
                return
            time.sleep(POLL_SECONDS)

    def _serve_requests(self) -> None:
        while True:
            try:
                said = self._store.queue_pop(self.secret.key_name("asks"))  # waits for a request
            except distributed.DistStoreError:  # no request came
                continue
            if self._is_over.is_set():
                return
            try:
                asked = json.loads(self.secret.verify_message("asks", said))
                name = str(asked["name"])
                version = int(asked["version"])
            except (PermissionError, ValueError, KeyError, TypeError, RecursionError) as error:
                self.log.warning("Passed over what asked for weights at %s: %s", self.source, error)
                continue
            try:
                self._answer_request(**asked | {"name": name, "version": version})
            except (
                Exception
            ) as error:  # the server died or the connection failed; it will ask again
                self.log.warning(
                    "Version %d did not reach server %s: %s", asked["version"], asked["name"], error
                )
                self._pairs.pop(asked["name"], None)

    def _describe_memory(self) -> dict[str, Any]:
        """Return what one server needs to read the snapshot, or why it cannot."""
        assert self._snapshot is not None
        try:
            return {"stamp": self._stamp.describe_stamp(), **self._snapshot.describe_memory()}
        except (RuntimeError, OSError) as error:
            return {"refused": str(error)}

    def _publish_key(self, key: str, text: str) -> None:
        self._store.set(self.secret.key_name(key), self.secret.sign_message(key, text))

    def _answer_request(
        self, name: str, version: int, number: int = 0, what: str = SEND, device: str = "cpu"
    ) -> None:
        """Answer a server's request.

        Args:
            name: name of the server.
            version: version that the server requests or has copied.
            number: number of the request, by which the server finds the answer.
            what: SEND: transfer the weights; SHOW: describe the memory to be mapped; TAKEN: the
                server reports that it has copied the version.
            device: type of the server's device.
        """
        with self._lock:
            if what == TAKEN:
                self._taken[name] = version
                return
            if what == SHOW:
                self._publish_key(f"memory/{name}", json.dumps(self._describe_memory()))
            self._publish_key(f"answer/{name}/{number}", str(self._stamp.version))
            if what == SEND and version == self._stamp.version:
                assert self._snapshot is not None
                memory = self._snapshot.memory
                if name not in self._pairs:
                    self._pairs[name] = create_pair(
                        self._store, self.secret.key_name(name), 0, torch.device(device)
                    )
                for _, first, end in group_tensors(self._snapshot.layout, len(memory)):
                    part = memory[first:end].cpu() if device == "cpu" else memory[first:end]
                    start_transfer(self._pairs[name], "send", part)()
                if memory.is_cuda:
                    torch.cuda.current_stream().synchronize()
                self._taken[name] = version


class _Shown:
    """The trainer's snapshot, mapped into this process by CUDA IPC.

    Raises RuntimeError or OSError if it cannot be mapped.
    """

    def __init__(self, words: dict[str, Any], device: torch.device) -> None:
        if "refused" in words:
            raise RuntimeError(words["refused"])
        self.stamp = StampReader(words["stamp"])
        self.memory = map_memory(words, device)
        self.layout: Layout = [tuple(row) for row in words["layout"]]
        self._is_here = words["gpu"] == gpu_of(device)

    def copy_weights(self, arrivals: "_Arrivals", arrived: Arrived) -> None:
        """Copy the snapshot into the server's tensors.

        If both processes use the same GPU, tensors are copied directly; otherwise a copy engine
        copies them in portions, which is faster over NVLink. Raises ValueError for unexpected
        tensors.
        """
        if arrivals.layout != self.layout:
            rows = self.layout + arrivals.layout
            name = min(row[0] for row in rows if rows.count(row) == 1)
            raise ValueError(
                f"the trainer's weights are of another model than this server's: {name} differs"
            )
        if self._is_here:
            found = tensors_in(self.memory, self.layout)
            torch._foreach_copy_(
                list(arrivals.into.values()), [found[name] for name in arrivals.into]
            )
        else:
            arrivals.take_portions(self._start_copy, arrived)
        if self.memory.is_cuda:
            torch.cuda.current_stream(self.memory.device).synchronize()

    @cached_property
    def _copy_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.memory.device)

    def _start_copy(self, part: slice, room: torch.Tensor) -> Callable[[], None]:
        """Start to copy bytes of the snapshot to `room`; return a function that waits for the copy."""
        now = torch.cuda.current_stream(room.device)
        self._copy_stream.wait_stream(now)  # which has used the buffer
        with torch.cuda.stream(self._copy_stream):
            room.copy_(self.memory[part], non_blocking=True)
        return partial(now.wait_event, self._copy_stream.record_event())


@dataclass
class _Trainer:
    """A server's connection to a trainer: its store, and its process group or mapped memory."""

    source: str
    device: torch.device
    store: Any
    secret: Secret
    pair: Any = None
    shown: _Shown | None = None
    is_out_of_reach: bool = False  # the memory cannot be mapped on this machine


class NetworkReceiver(Receiver):
    """Receiver that copies from the trainer's memory if possible, else requests a transfer."""

    def __init__(self) -> None:
        self._name = f"{socket.gethostname()}-{time.monotonic_ns()}"
        self._trainer: _Trainer | None = None  # of the current run
        self._arrivals: _Arrivals | None = None
        self._asked = 0

    @torch.no_grad()
    def receive_version(
        self,
        message: Message,
        version: int,
        place: Path,
        into: Tensors,
        arrived: Arrived = ignore_arrivals,
    ) -> None:
        source = message["source"]
        dtype = DTYPES[message["dtype"]]
        device = next(iter(into.values())).device
        try:
            trainer = self._trainer
            key = bytes.fromhex(message.get("secret", ""))
            if trainer is None or (trainer.source, trainer.device, trainer.secret.key) != (
                source,
                device,
                key,
            ):
                host, _, port = source.rpartition(":")
                store = distributed.TCPStore(host, int(port), is_master=False, timeout=CONNECT)
                store.set_timeout(TIMEOUT)
                trainer = self._trainer = _Trainer(source, device, store, Secret(key))
            if self._arrivals is None or not self._arrivals.is_for(into, dtype):
                self._arrivals = _Arrivals(into, dtype)
            shown = self._open_shared_memory(trainer, message, version)
            if shown is None:
                self._request_version(trainer, SEND, version)
                trainer.pair = trainer.pair or create_pair(
                    trainer.store, trainer.secret.key_name(self._name), 1, device
                )
                self._arrivals.take_portions(
                    lambda _, room: start_transfer(trainer.pair, "recv", room), arrived
                )
                return
            with shown.stamp.hold_version(TIMEOUT.total_seconds()) as newest:
                unless_superseded(version, newest)
                shown.copy_weights(self._arrivals, arrived)
            # The weights are here, even if the trainer does not learn of it.
            with suppress(distributed.DistError):
                self._send_request(trainer, TAKEN, version)
        except (RuntimeError, OSError, distributed.DistError) as error:
            self._trainer = None
            raise ValueError(
                f"weights could not be had from {source}: {str(error).splitlines()[0]}"
            ) from None

    def _send_request(self, trainer: _Trainer, what: str, version: int) -> None:
        said = {"name": self._name, "number": self._asked, "version": version, "what": what}
        text = json.dumps(said | {"device": trainer.device.type})
        trainer.store.queue_push(
            trainer.secret.key_name("asks"), trainer.secret.sign_message("asks", text)
        )

    def _request_version(self, trainer: _Trainer, what: str, version: int) -> None:
        """Send a request, and wait until the trainer confirms that it has `version`.

        Raises Superseded if the trainer has another version.
        """
        self._asked += 1
        self._send_request(trainer, what, version)
        unless_superseded(
            version, int(self._read_key(trainer, f"answer/{self._name}/{self._asked}"))
        )

    def _read_key(self, trainer: _Trainer, key: str) -> str:
        return trainer.secret.verify_message(key, trainer.store.get(trainer.secret.key_name(key)))

    def _open_shared_memory(
        self, trainer: _Trainer, message: Message, version: int
    ) -> _Shown | None:
        """Map the trainer's memory if it is on a GPU of this machine, else return None."""
        if (
            trainer.shown is None
            and not trainer.is_out_of_reach
            and is_near(message, trainer.device)
        ):
            self._request_version(trainer, SHOW, version)
            words = json.loads(self._read_key(trainer, f"memory/{self._name}"))
            try:
                trainer.shown = _Shown(words, trainer.device)
            except (RuntimeError, OSError) as error:
                if message.get("gpu") == gpu_of(trainer.device):
                    raise  # NCCL supports no pair of processes on one GPU
                trainer.is_out_of_reach = True
                why = str(error).splitlines()[0]
                log.info(
                    "The trainer's memory cannot be read from here, so it sends its weights (%s)",
                    why,
                )
        return trainer.shown


def is_near(message: Message, device: torch.device) -> bool:
    """Return True if `device` is a GPU on the machine of the trainer's GPU, as given in `message`."""
    own = {"machine": machine_of(), "gpu": gpu_of(device)}
    return device.type == "cuda" and any(
        value and message.get(key) == value for key, value in own.items()
    )


def unless_superseded(version: int, newest: int) -> None:
    if newest != version:
        raise Superseded(f"version {version} was requested, the trainer has {newest}")


class _Arrivals:
    """A server's tensors, and two buffers through which the snapshot is copied to them."""

    def __init__(self, into: Tensors, dtype: torch.dtype) -> None:
        """Set up for contents that arrive in `dtype`."""
        self.into = into
        self.dtype = dtype
        self.layout, self._size = layout_of(into, dtype)

    @cached_property
    def _list_parts(
        self,
    ) -> list[tuple[slice, torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]]:
        """Return for each portion: its byte range, a buffer, views of the buffer, and target
        tensors.
        """
        parts = list(group_tensors(self.layout, self._size))
        sizes = [end - first for _, first, end in parts]
        device = next(iter(self.into.values())).device
        rooms = [
            torch.empty(max(sizes[k::2], default=0), dtype=torch.uint8, device=device)
            for k in (0, 1)
        ]
        found = []
        for k, (layout, first, end) in enumerate(parts):
            arrived = tensors_in(rooms[k % 2], layout)
            places = [self.into[name] for name in arrived]
            found.append((slice(first, end), rooms[k % 2][: sizes[k]], arrived, places))
        return found

    def take_portions(
        self, moving: Callable[[slice, torch.Tensor], Callable[[], None]], arrived: Arrived
    ) -> None:
        """Receive all portions; each arrives while the previous one is copied.

        `moving` starts a transfer into a buffer and returns a function that waits for it.
        """
        waits = [moving(part, room) for part, room, *_ in self._list_parts[:1]]
        for k, (*_, portion, places) in enumerate(self._list_parts):
            if k + 1 < len(self._list_parts):
                waits.append(moving(*self._list_parts[k + 1][:2]))
            waits[k]()
            torch._foreach_copy_(places, list(portion.values()))
            arrived(portion)

    def is_for(self, into: Tensors, dtype: torch.dtype) -> bool:
        return into is self.into and dtype == self.dtype


def group_tensors(layout: Layout, size: int) -> Iterator[tuple[Layout, int, int]]:
    """Group tensors into transfers of about PORTION_BYTES; yield (tensors, start, end)."""
    begin = 0
    for i, (*_, first) in enumerate([*layout[1:], ("", "", [], size)], 1):
        if first - layout[begin][3] >= PORTION_BYTES or i == len(layout):
            yield layout[begin:i], layout[begin][3], first
            begin = i


def start_transfer(
    group: Any, what: Literal["send", "recv"], memory: torch.Tensor
) -> Callable[[], None]:
    """Start a send or receive with the pair's peer; return a function that waits for it.

    With NCCL the operation is a coalesced group of one, because a plain send or receive would
    create another communicator.
    """
    one = getattr(group, what)
    other = 1 - group.rank()
    if group.supports_coalescing:
        group._start_coalescing()
        one([memory], other, 0)
        return group._end_coalescing().wait
    return partial(one([memory], other, 0).wait, TIMEOUT)


def create_pair(store: Any, name: str, rank: int, device: torch.device) -> Any:
    """Return a process group of the trainer (rank 0) and one server (rank 1)."""
    named = distributed.PrefixStore(f"pair/{name}", store)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return distributed.ProcessGroupNCCL(named, rank, 2, options)
    # Otherwise one that is gone blocks others.
    return distributed.ProcessGroupGloo(named, rank, 2, CONNECT)
