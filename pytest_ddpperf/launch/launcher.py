"""The face of this room: what can be asked of ranks, in plain values. Knows neither limits nor baselines."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pytest_ddpperf.launch import environ, locks, topology
from pytest_ddpperf.launch.collect import collected
from pytest_ddpperf.launch.cores import place
from pytest_ddpperf.launch.held import Held, HeldLaunch, until_left
from pytest_ddpperf.launch.observer import Nobody, Observer
from pytest_ddpperf.launch.run import Delivery, Launch
from pytest_ddpperf.launch.server import RankServer
from pytest_ddpperf.records import Imported, LaunchSamples, Plan, Scalar, Window, codec
from pytest_ddpperf.records.errors import TransportError
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.trees import Trees, digests

# What an RPC launch imports beyond others: half a second, which only runs that use RPC pay.
_RPC_PRELOAD = ("pytest_ddpperf.rank.rpc",)


_L = TypeVar("_L", bound=Launch)


class Launcher:
    """Launches of one pytest session, one after the other, over one rank server.

    `modules` yields the test modules and conftests as name -> file. `rpc` says that there will be RPC launches: what
    they import is imported from the first time on. `trees` are from where the ranks import the user's code: launches
    say what they imported; None where it is not asked. `folder` goes if this process is killed.
    """

    def __init__(
        self,
        modules: Callable[[], Mapping[str, str]],
        *,
        rpc: bool = False,
        trees: Trees | None = None,
        folder: str = "",
    ) -> None:
        self._modules = modules
        self._rpc = rpc
        self._trees = trees
        self._server = RankServer(trees if trees is not None and trees.base != trees.hand else None, folder)
        self._facts: dict[str, Scalar] | None = None

    def probe(self, preload: Sequence[str], timeout: float) -> Mapping[str, Scalar]:
        """What the machine and its torch offer (see `rank.environment.probe`), asked once."""
        if self._facts is None:
            plan = Plan(world_size=1, backend="", device="cpu", preload=tuple(preload), timeout_seconds=timeout)
            delivery = self._launch(plan, payload.dumps("probe", None, ()), Nobody())
            self._facts = json.loads(delivery.results[0])
        return self._facts

    def measure(
        self,
        plan: Plan,
        setup: Callable[..., Any] | None,
        observer: Observer,
        others: Sequence[Callable[..., Any] | None] = (),
    ) -> LaunchSamples:
        """One launch of `plan` on fresh ranks; raises LaunchError, ServerError, SpaceError or TransportError.

        `setup` is None where the plan has a collective. In an RPC launch it is the trainers', and `others` those of the
        master and of the parameter servers.
        """
        data = payload.dumps("measure_rpc" if plan.rpc else "measure", setup, others)
        with self.alone(plan, observer):
            return self._samples(plan, self._launch(plan, data, observer))

    @contextmanager
    def hold(self, plan: Plan, setup: Callable[..., Any] | None, observer: Observer) -> Iterator[Held]:
        """A launch of `plan` that has warmed up and rests; over, clean-up included, when the context is left. Raises as
        `measure`. One at a time, while somebody holds the cores: see `alone`."""
        with self._opened(HeldLaunch, plan, payload.dumps("measure", setup, ()), observer) as launch:
            launch.begin()
            with until_left(Held(launch, partial(self._samples, plan))) as held:
                yield held

    def _samples(self, plan: Plan, delivery: Delivery) -> LaunchSamples:
        timed = delivery.results[: plan.world_size]
        windows = [codec.decode(Window, json.loads(result)) for result in timed]
        placement = place(plan.processes, os.environ)
        facts: Mapping[str, Scalar] = {
            **windows[0].facts,
            "interconnect": self._interconnect(plan),
            **environ.recorded(os.environ),
            "cores": placement.cores,
            "cores_per_rank": placement.cores_per_rank,
            "pinned": placement.pinned,
        }
        # Empty from one that was killed while it served, because a trainer's clean-up did not end.
        served = filter(None, delivery.results[plan.world_size :])
        every = [window.imported for window in windows]
        every += [codec.decode(Imported, json.loads(result)) for result in served]
        return replace(
            collected(plan, windows, delivery, facts=facts),
            files=self._files({file for imported in every for file in imported.files}),
            others=tuple(sorted({module for imported in every for module in imported.others})),
        )

    def call(self, plan: Plan, function: Callable[..., Any], args: Sequence[Any], observer: Observer) -> list[Any]:
        """`function(ctx, *args)` on every rank of a fresh group: the results by rank."""
        delivery = self._launch(replace(plan, warmup=0, steps=0), payload.dumps("call", function, args), observer)
        values = []
        for rank, result in enumerate(delivery.results):
            try:
                values.append(pickle.loads(result))
            except Exception as error:
                raise TransportError(
                    f"the result of rank {rank}", f"it arrived, but {type(error).__name__}: {error}"
                ) from None
        return values

    def _files(self, imported: Collection[str]) -> dict[str, str]:
        return digests(self._trees.base, sorted(imported)) if self._trees is not None else {}

    def _interconnect(self, plan: Plan) -> str | None:
        if plan.device != "cuda":
            return None
        gpus = topology.visible(os.environ.get("CUDA_VISIBLE_DEVICES"), plan.world_size)
        return topology.interconnect(str((self._facts or {}).get("topology") or ""), gpus)

    def close(self) -> None:
        self._server.stop()

    @contextmanager
    def alone(self, plan: Plan, observer: Observer) -> Iterator[None]:
        """Nothing else is timed on the same cores or devices meanwhile."""
        self._ensure(plan)  # first, for it may take seconds
        addresses = str((self._facts or {}).get("device_addresses") or "").split(",")[: plan.processes]
        cores = place(plan.processes, os.environ).used
        with locks.hold(locks.resources(cores, addresses if plan.device == "cuda" else ()), observer.waiting):
            yield

    def _ensure(self, plan: Plan) -> None:
        self._rpc = self._rpc or plan.rpc
        self._server.ensure(os.environ, (*plan.preload, *(_RPC_PRELOAD if self._rpc else ())))

    def _launch(self, plan: Plan, data: bytes, observer: Observer) -> Delivery:
        with self._opened(Launch, plan, data, observer) as launch:
            return launch.run()

    @contextmanager
    def _opened(self, kind: type[_L], plan: Plan, data: bytes, observer: Observer) -> Iterator[_L]:
        self._ensure(plan)
        placement = place(plan.processes, os.environ)
        with kind(self._server, plan, data, self._modules(), placement, observer, self._trees) as launch:
            yield launch
