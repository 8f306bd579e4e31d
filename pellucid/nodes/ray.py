"""Workers as Ray's actors: Ray finds places for them and starts them, and no plan passes it.

One bundle for each stage of a pipeline holds all its ranks, so those that share layers share a machine; where
none has room for them, each rank has a bundle.  An actor dials the engine, and is a member from then on; Ray
starts none again.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

from pellucid import member
from pellucid.cluster.line import Line
from pellucid.executor.multiproc import Arrangement, MultiprocExecutor
from pellucid.nodes.connection import admit, dial, hear, listen, say
from pellucid.nodes.launcher import inherited
from pellucid.nodes.local import NOTES
from pellucid.nodes.place import Node, Place
from pellucid.resolve import Resolved

PATIENCE = 30.0  # seconds in which an actor that runs dials
ANSWER = 1.0  # seconds in which it tells what it has noted
KNOWN = 3.0  # seconds in which Ray knows why the first one has ended, and those that end with it
AUTH = "RAY_AUTH_MODE"  # the variable, which Ray sets where it finds a token
SHOWN = 400  # characters of what Ray says of an end


def of_ray(name: str = "ray") -> Any:
    """A module of Ray, which is an extra."""
    return import_module(name)


def ray_executor() -> MultiprocExecutor:
    """Raises ValueError if Ray is not installed."""
    try:
        of_ray()
    except ImportError:
        raise ValueError("executor is 'ray', which is not installed: pip install 'pellucid[ray]'") from None
    return MultiprocExecutor(arrange=on_ray)


def on_ray(resolved: Resolved, places: list[Place]) -> Arrangement:
    """Join the cluster that RAY_ADDRESS names or that runs on this machine, or start one; find places there.

    Raises ValueError if there are none.
    """
    launcher = RayLauncher(resolved, places)
    found, nodes = launcher.find()
    return Arrangement(launcher, replace(resolved, nodes=nodes), found)


class Rank:
    """What an actor is before it is a member, and what it answers beside that."""

    def __init__(self) -> None:
        self._notes = mmap.mmap(-1, NOTES)

    def where(self) -> tuple[str, int, int]:
        """Its machine's address, its GPU's index there, and its process."""
        ray = of_ray()
        gpus = ray.get_gpu_ids()
        return ray.util.get_node_ip_address(), int(gpus[0]) if gpus else 0, os.getpid()

    def notes(self) -> bytes:
        return self._notes[:]

    def live(self, name: str, address: str, port: int, secret: bytes) -> None:
        """Dial the owner, and be a member until the end."""
        connection = dial(address, port, secret)
        say(connection, name)
        connection.settimeout(None)
        member.live(Line.over(connection), name, memoryview(self._notes))


class RayLauncher:
    """Ranks in the order in which they are started."""

    def __init__(self, resolved: Resolved, places: list[Place]) -> None:
        ray, self._hint = of_ray(), ""
        if not ray.is_initialized():
            is_said = AUTH in os.environ
            try:
                ray.init("auto", logging_level=logging.ERROR)  # or what RAY_ADDRESS says
            except ConnectionError:
                ray.init(include_dashboard=False, logging_level=logging.ERROR)
            if not is_said and AUTH in os.environ:
                self._hint = f"; Ray found a token here: if the cluster has none, set {AUTH}=disabled"
        self._ray, self._places, self._num_started = ray, places, 0
        self._wants_gpu = resolved.platform.device == "cuda"
        self._secret, self._address = secrets.token_bytes(32), str(ray.util.get_node_ip_address())
        self._listener = listen(self._address)
        self._listener.settimeout(PATIENCE)
        self._seconds = resolved.user.parallel.worker_timeout  # in which Ray finds places, and starts actors
        self._group = self._reserve(resolved)
        self._actors: list[Any] = [self._start_actor(i // self._ranks_a_bundle) for i in range(len(places))]
        self._pids: list[int] = []
        self._known_by = 0.0  # by the monotonic clock; 0: all live

    def _reserve(self, resolved: Resolved) -> Any:
        num_stages, size = len({place.pp for place in self._places}), 1 + max(p.tp for p in self._places)
        bundles = {
            places: {"CPU": places, **({"GPU": places} if self._wants_gpu else {})} for places in (1, size)
        }
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fits = any(all(has.get(name, 0) >= num for name, num in bundles[size].items()) for has in machines)
        self._ranks_a_bundle = size if fits else 1
        bundle, num = bundles[self._ranks_a_bundle], num_stages * size // self._ranks_a_bundle
        group = self._ray.util.placement_group([bundle] * num, strategy="PACK")
        if not group.wait(self._seconds):
            self._ray.util.remove_placement_group(group)
            raise ValueError(
                f"after {self._seconds:g} s Ray has no place for {num} times {bundle}, each on one machine; "
                f"it has {self._ray.available_resources()} free: lower the parallel sizes, or add machines"
            )
        return group

    def _start_actor(self, bundle: int) -> Any:
        scheduling = of_ray("ray.util.scheduling_strategies")
        # Ranks see all GPUs of their machine: they reach each other's memory by these indices.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {"PYTHONPATH": path, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", **inherited()}
        options = {
            "num_cpus": 1,
            "num_gpus": int(self._wants_gpu),
            "max_restarts": 0,
            "max_concurrency": 2,  # a life, and a question beside it
            "runtime_env": {"env_vars": environment},
            "scheduling_strategy": scheduling.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }
        return self._ray.remote(Rank).options(**options).remote()

    def find(self) -> tuple[list[Place], tuple[Node, ...]]:
        """Where the actors are.  Raises RuntimeError if Ray does not start them."""
        try:
            facts = self._ray.get([actor.where.remote() for actor in self._actors], timeout=self._seconds)
        except self._ray.exceptions.RayError as error:
            for actor in list(self._actors):
                self.release(actor)
            is_late = isinstance(error, self._ray.exceptions.GetTimeoutError)
            took = f" in {self._seconds:g} s" if is_late else ""
            raise RuntimeError(
                f"Ray has started no actors on their machines{took}{self._hint}: {error}"
            ) from error
        addresses = list(dict.fromkeys(address for address, _, _ in facts))
        self._pids = [pid for _, _, pid in facts]
        places = [
            place._replace(device=gpu, node=addresses.index(address))
            for place, (address, gpu, _) in zip(self._places, facts, strict=True)
        ]
        return places, tuple(Node(address, 0) for address in addresses)

    def start(self, name: str, node: int = 0) -> tuple[RayProcess, Line]:
        """Make the next actor a member.  Raises RuntimeError if it does not dial."""
        index, self._num_started = self._num_started, self._num_started + 1
        actor = self._actors[index]
        life = actor.live.remote(name, self._address, self._listener.getsockname()[1], self._secret)
        try:
            connection = admit(self._listener.accept()[0], self._secret)
            assert hear(connection, str) == name, "actors dial one by one"
        except (OSError, EOFError) as error:
            raise RuntimeError(f"{name} has not dialled: {error}") from None
        connection.settimeout(None)
        return RayProcess(self, actor, life, self._pids[index]), Line.over(connection)

    def patience(self) -> float:
        """Seconds that Ray has left to say why actors have ended."""
        self._known_by = self._known_by or time.monotonic() + KNOWN
        return max(0.0, self._known_by - time.monotonic())

    def release(self, actor: Any) -> None:
        """End an actor; behind the last one give the places back.

        Where a script ends, Ray has ended before, and would begin anew if it were asked for anything.
        """
        if actor not in self._actors:
            return
        self._actors.remove(actor)
        if not self._actors:
            self._listener.close()
        if self._ray.is_initialized():
            self._ray.kill(actor)
            if not self._actors:
                self._ray.util.remove_placement_group(self._group)


class RayProcess:
    """An actor.  Ray tells no exit code."""

    is_stopped = False
    is_lost = True

    def __init__(self, launcher: RayLauncher, actor: Any, life: Any, pid: int) -> None:
        self._launcher, self._actor, self._life, self._pid = launcher, actor, life, pid
        self._last = b""

    @property
    def pid(self) -> int:
        return self._pid

    def notes(self) -> bytes:
        """As they are, or as they were last if the actor does not answer."""
        ray = of_ray()
        if ray.is_initialized():
            with suppress(ray.exceptions.RayError):
                self._last = bytes(ray.get(self._actor.notes.remote(), timeout=ANSWER))
        return self._last

    def reason(self) -> str:
        """What Ray knows of its end, a node without memory above all."""
        ray = of_ray()
        try:
            if ray.is_initialized():
                ray.get(self._life, timeout=self._launcher.patience())
        except ray.exceptions.GetTimeoutError:  # it does not know yet
            return ""
        except ray.exceptions.RayError as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            best = [*(line for line in said if "because" in line), *said, type(error).__name__][0]
            return f"Ray says: {best[:SHOWN]}"
        return ""

    def exit_code(self, seconds: float = 0.0) -> int | None:
        return None

    def kill(self) -> None:
        self._launcher.release(self._actor)

    def wait(self) -> None:
        """Whoever has been killed is gone, or out of reach."""
