"""Weight updates: load each published version into every server and verify it.

    broadcasts/step_V ─ detect ─► update every server ─► checksum is the trainer's? ─► rollouts use it
                                                            └─► canary is the trainer's? ─► batches published; evaluate
                                 no: the run ends, naming the weights that differ

The canary is a fixed text whose logprobs must agree between server and trainer. It is scored at the
same time as the first requests of a version, and no batch is published before its result is known.
A server without a checksum (vLLM) has to pass the canary before rollouts use it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hone.clients.fleet import Fleet, Server
from hone.clients.http import HttpClient, ServerLost
from hone.config.rl_config import OrchestratorRunConfig
from hone.records import Refused
from hone.run_directory import RunDirectory, Steps
from hone.transport.deadlines import POLL_SECONDS, PulseOf, Wait
from hone.transport.delivery import Delivery, Superseded, read_delivery

# In which another trainer may still claim the directory of a run that seems to have ended.
CLAIM_PATIENCE_SECONDS = 20.0
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of canary logprobs, unless configured
# … for servers that round logits elsewhere.
OTHER_KERNELS = {"float32": 1e-3, "bfloat16": 0.5}
# A change of the trainer's canary that a server with new weights must reproduce.
CANARY_CHANGE = 0.02


class RowSink(Protocol):
    """Receives the metrics of the training step that made a version."""

    def write_trained(self, version: int, values: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class Taken:
    """Result of loading a version into a server.

    `state` is the server's answer; `difference` is the largest canary difference, None if not
    measured yet.
    """

    client: HttpClient
    state: dict[str, Any]
    difference: float | None = None


class Weights:
    """Load published versions into every server, and track the newest version that is served."""

    def __init__(
        self,
        run: RunDirectory,
        config: OrchestratorRunConfig,
        clients: list[HttpClient],
        log: logging.Logger,
    ) -> None:
        self.run = run
        self.config = config
        self.log = log
        # The real path, as it is sent to servers.
        self.published = Steps(run.broadcasts.resolve())
        self.fleet = Fleet(
            clients,
            self.revive_server,
            config.client.ready_timeout,
            log,
            config.max_async_level > 0,
        )
        self.trainer = PulseOf(run.pulse_file("trainer"))
        self.version = -1
        self.seen = -1
        self.current: Delivery | None = None
        self.busy = asyncio.Lock()  # held while a version is loaded or evaluated
        # Last version loaded, by server address.
        self.scored: dict[str, tuple[Delivery, list[float]]] = {}
        self.taken: dict[Server, Taken] = {}  # for the newest version
        self.proven = asyncio.Event()  # set once every server has verified it

    async def join_trainer(self) -> int | None:
        """Wait for a live trainer, load its starting version into every server, and return it.

        Returns None if no trainer starts because the run is over.
        """
        hint = f"is there a trainer over it? (trainer @ FILE --output-dir {self.run.path})"
        wait = Wait(
            f"the trainer of a run in {self.run.path}", self.config.weights_timeout, self.log, hint
        )
        while True:
            versions = self.published.list_numbers() if self.trainer.is_beating() else []
            delivery = read_delivery(self.published.path_of(versions[-1])) if versions else None
            if delivery is not None and delivery.run == self.run.id_on_disk():
                self.run.id = delivery.run
                self.seen = delivery.version
                await self._adopt_delivery(delivery)
                await self._prove_delivery(delivery)
                return delivery.version
            if (
                time.monotonic() - wait.start > CLAIM_PATIENCE_SECONDS
                and self.run.ended_at() >= self.config.max_steps
            ):
                return None
            wait.is_check_due()
            await asyncio.sleep(0.05)

    def is_evaluated(self, version: int) -> bool:
        return self.config.eval is not None and self.config.eval.is_due(
            version, self.config.max_steps
        )

    async def watch_deliveries(
        self,
        rows: RowSink,
        adopted: Callable[[int], None],
        evaluate: Callable[[int], Awaitable[None]],
    ) -> None:
        """Load new versions as they are published, until an error is raised.

        Args:
            rows: receives the training metrics of each version.
            adopted: called with a version when the servers have loaded it.
            evaluate: called with the version afterwards; the next version is loaded when it has returned.
        """
        while True:
            newest = self.find_delivery(rows)
            if newest is not None:
                async with self.busy:
                    values = newest.metrics
                    try:
                        values = values | await self._adopt_delivery(newest)
                        if self.version == newest.version:
                            adopted(self.version)
                            values = values | await self._prove_delivery(newest)
                    finally:
                        rows.write_trained(newest.version, values)
                    # Superseded: the next version is there, or about to be.
                    if self.version < newest.version:
                        if self.is_evaluated(newest.version):
                            self.log.warning(
                                "Version %d is not evaluated: the next one came first",
                                newest.version,
                            )
                        continue
                    # The next version is loaded afterwards, so that results are of one version.
                    await evaluate(self.version)
            await asyncio.sleep(POLL_SECONDS)

    async def at_least(self, version: int) -> None:
        """Wait until the servers have policy version `version` or a later one.

        Raises ConnectionError if this takes longer than `weights_timeout` or the trainer is gone.
        """
        what = f"version {version} of the weights in {self.run.broadcasts}"
        wait = Wait(what, self.config.weights_timeout, self.log, "is the trainer still running?")
        while self.version < version:
            if self.seen < version and self.trainer.is_dead():
                raise ConnectionError(
                    f"waiting for {what}: the trainer of this run has gone silent"
                )
            if wait.is_check_due():
                self.run.require_own()
            await asyncio.sleep(POLL_SECONDS)

    def find_delivery(self, rows: RowSink) -> Delivery | None:
        """Return the newest published version that is not loaded yet, or None.

        If versions that are due for evaluation are among those not loaded yet, the oldest of them
        is returned instead. Training metrics of skipped versions go to `rows`.
        """
        newest = None
        for version in self.published.list_numbers():
            if version > self.seen:
                found = read_delivery(self.published.path_of(version))
                if found is not None and found.run == self.run.id:
                    if newest is not None:
                        rows.write_trained(newest.version, newest.metrics)
                    newest = found
                    self.seen = version
                    if self.is_evaluated(version):
                        break
        return newest

    async def _adopt_delivery(self, delivery: Delivery) -> dict[str, float]:
        """Load a version into every live server.

        A lost server loads the version when it is back. Returns metrics of the update, empty if the
        trainer has replaced the version meanwhile.
        """
        start = time.perf_counter()
        self.current = delivery
        self.taken = {}

        async def is_current(server: Server) -> bool:
            try:
                self.taken[server] = await server.unless_lost(
                    self._update_server(server.client, delivery)
                )
                server.version = delivery.version
            except ServerLost as error:
                self.fleet.report_lost(server, str(error))
            except Superseded:
                return False
            return True

        if not all(
            await asyncio.gather(*(is_current(server) for server in self.fleet.live_servers))
        ):
            return {}
        self.version = delivery.version
        self.proven.clear()
        seconds = time.perf_counter() - start
        self.log.info(
            "Version %d: %d servers took %.2f MiB (%s) in %.3f s, checksum %s",
            delivery.version,
            len(self.taken),
            delivery.bytes / 2**20,
            delivery.transport["type"],
            seconds,
            delivery.checksum,
            extra={"console": False},
        )
        return {
            "weights/bytes": delivery.bytes,
            "time/publish_weights": delivery.seconds,
            "time/update_weights": seconds,
        }

    async def _prove_delivery(self, delivery: Delivery) -> dict[str, float]:
        """Compare each server's canary logprobs with the trainer's, unless already done.

        Returns the largest difference as a metric.
        """

        async def prove_server(server: Server, taken: Taken) -> float:
            if taken.difference is not None:
                return taken.difference
            try:
                return await server.unless_lost(self._measure_canary(taken, delivery))
            except ServerLost as error:
                self.fleet.report_lost(server, str(error))
                return 0.0

        asked = [
            prove_server(server, taken) for server, taken in self.taken.items() if server.is_up
        ]
        differences = await asyncio.gather(*asked)
        self.proven.set()
        return {"weights/canary_difference": max(differences, default=0.0)}

    async def revive_server(self, client: HttpClient) -> int:
        """Load the current version into a server that was lost."""
        while True:
            delivery = self.current
            assert delivery is not None
            try:
                taken = await self._update_server(client, delivery)
                if taken.difference is None:
                    await self._measure_canary(taken, delivery)
            except Superseded:  # it will get the next version too
                await asyncio.sleep(0.1)
                continue
            if delivery is self.current:
                return delivery.version

    async def _update_server(self, client: HttpClient, delivery: Delivery) -> Taken:
        """Load a version into a server and verify the server's checksum.

        Without a comparable checksum, the canary is verified instead.
        """
        version = delivery.version
        body = {
            "weight_dir": str(self.published.path_of(version)),
            "version": version,
            "transport": delivery.transport,
            "model_name": self.config.model.name,
        }
        try:
            state = await client.call_control("update_weights", body)
            if state["is_paused"]:  # by another client
                await client.call_control("resume", {})
        except RuntimeError as error:  # a refusal that this run cannot handle
            if isinstance(error, Refused) and error.status == 409:
                raise Superseded from None
            raise ConnectionError(f"version {version} was not taken: {error}") from None
        taken = Taken(client, state)
        if state["checksum"] is None or state["dtype"] != delivery.dtype:
            return Taken(client, state, await self._measure_canary(taken, delivery))
        if state["checksum"] != delivery.checksum:
            now = await client.call_control("version?each=true")
            raise ConnectionError(
                f"{client.base_url} serves other weights than version {version}: checksum {state['checksum']}, the "
                f"trainer's is {delivery.checksum}; {what_differs(now, delivery)}"
            )
        return taken

    async def _measure_canary(self, taken: Taken, delivery: Delivery) -> float:
        """Return the largest difference between the canary logprobs of server and trainer.

        Raises ConnectionError if it exceeds the tolerance, ServerLost if the server was restarted.
        """
        client = taken.client
        state = taken.state
        version = delivery.version
        try:
            scored = (await client.call_control("score", {"ids": delivery.canary.ids}))["logprobs"]
        except RuntimeError as error:
            raise ConnectionError(
                f"the canary of version {version} was not scored: {error}"
            ) from None
        worst = max(abs(a - b) for a, b in zip(scored, delivery.canary.logprobs, strict=True))
        usual = CANARY_TOLERANCE if state["checksum"] is not None else OTHER_KERNELS
        tolerance = self.config.canary_tolerance or max(
            usual[delivery.dtype], usual[state["dtype"]]
        )
        before = self.scored.get(client.base_url)
        if state["checksum"] is None and before is not None and scored == before[1]:
            moved = max(
                abs(a - b)
                for a, b in zip(delivery.canary.logprobs, before[0].canary.logprobs, strict=True)
            )
            if moved > CANARY_CHANGE:
                raise ConnectionError(
                    f"{client.base_url} scores the canary of version {version} exactly as that of version "
                    f"{before[0].version}, though the trainer's has moved by {moved:.2g}: it keeps the old weights"
                )
        if not worst <= tolerance:
            now = await client.call_control("version?each=true")
            if now["version"] != version:
                raise ServerLost(
                    f"{client.base_url} was started again while it took version {version}"
                )
            raise ConnectionError(
                f"{client.base_url} and the trainer disagree on the canary of version {version}: logprobs differ by up "
                f"to {worst:.2g}, allowed are {tolerance:g} (canary-tolerance); {what_differs(now, delivery)}"
            )
        self.scored[client.base_url] = delivery, scored
        return worst


def what_differs(state: dict[str, Any], delivery: Delivery) -> str:
    """Describe which weights differ from the trainer's, in the model's order."""
    if state["checksum"] is None:
        return "which weights differ is not known there"
    if state["dtype"] != delivery.dtype:
        return f"weights are {state['dtype']} there and {delivery.dtype} here, so which of them differ is not known"
    theirs = state["fingerprints"]
    ours = delivery.fingerprints
    names = [name for name in ours if theirs.get(name) != ours[name]]
    if not names:
        return "the weights are the same"
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"of {len(ours)} weights {len(names)} differ: {', '.join(names[:3])}{rest}"
