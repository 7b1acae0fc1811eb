"""Measures configs where they will run: built ahead, proved, timed, in processes that may die."""

from __future__ import annotations

import importlib.machinery
import pickle
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from torchstone import env
from torchstone.compat import triton
from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.measure import prove
from torchstone.measure.jobs import Built, Described
from torchstone.measure.prove import Proof
from torchstone.records import Case, Crashed, TimedOut
from torchstone.records.tuning import Config, Final, Finals, Measurement, MeasurePolicy
from torchstone.tuner.search.base import Proposal
from torchstone.tuner.space import key_of
from torchstone.tuner.tunable import Tunable
from torchstone.worker import Limits, Worker

__all__ = ["LiveMeasurer"]

Failed = Crashed | TimedOut
_JOBS = "torchstone.measure.jobs"
_SPARED = 3  # cores for what is timed, and for us


class _Process:
    """A worker that has loaded the tunable; started when it is needed, and again when it has died."""

    def __init__(
        self, name: str, limits: Limits, tunable: Path, truths: Path | None, limit_s: float
    ) -> None:
        self._name, self._limits, self._limit_s = name, limits, limit_s
        self._tunable, self._truths = tunable, truths
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._closed = False

    def call(self, job: str, limit_s: float, **kwargs: object) -> Any:
        """What the job gives, or why it gives nothing.

        :raises InputError: where the tunable's inputs or its reference fail.
        """
        worker, fresh = self._alive()
        if worker is None:
            return Crashed(stage=job, kind="exit", text="the measurer is closed", log="")
        if fresh:
            truths = None if self._truths is None else str(self._truths)
            begun = self._ask(worker, "begin", self._limit_s, tunable=str(self._tunable), truths=truths)
            if isinstance(begun, Failed):
                raise InputError(
                    f"the inputs or the reference of {self._tunable.stem} fail: {_told(begun)['text']}",
                    hint=f"the tuner calls `reference(*inputs(0, **sizes))`\n{begun.log[-2000:]}",
                )
        return self._ask(worker, job, limit_s, **kwargs)

    def stop(self, *, close: bool = False) -> None:
        """End the worker; the next call starts another, unless this closes for good."""
        with self._lock:
            self._closed |= close
            if self._worker is not None:
                self._worker.close()

    def _alive(self) -> tuple[Worker | None, bool]:
        with self._lock:
            if self._closed:
                return None, False
            if self._worker is not None and self._worker.alive:
                return self._worker, False
            folder = self._tunable.parent
            self._worker = Worker(self._name, directory=folder, workload=None, limits=self._limits)
            return self._worker, True

    def _ask(self, worker: Worker, job: str, limit_s: float, **kwargs: object) -> Any:
        try:
            return worker.call(f"{_JOBS}:{job}", stage=job, limit_s=limit_s, **kwargs)
        except (InputError, EnvironmentLacksError) as error:  # the tunable's own
            return Crashed(stage=job, kind="exception", text=str(error), log="")


class LiveMeasurer:
    """Measures the configs of a tunable; a :class:`~torchstone.tuner.driver.Measurer`.

    One process proves and times; it is replaced when a config has killed or spoiled it.

    :param directory: for logs and what the processes share; made if need be.
    :param lanes: processes that build ahead; what they compile reaches the one that times by Triton's
        cache on disk. 0: that one builds by itself, as it does by default where Triton has no device.
    :param limits: of each process; by default half of the memory, and all cores.
    :raises InputError: where the tunable cannot be sent to another process.
    """

    def __init__(
        self,
        tunable: Tunable,
        policy: MeasurePolicy,
        directory: Path,
        lanes: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._tunable, self._policy = tunable, policy
        self._started = time.monotonic()
        here = env.environment()
        limits = limits or Limits(memory_bytes=here.memory_bytes // 2, threads=here.threads)
        if lanes is None:
            lanes = max(1, here.cores - _SPARED) if here.devices and triton.serves("cuda") else 0
        self.lanes = lanes
        directory.mkdir(parents=True, exist_ok=True)
        file, truths = directory / f"{tunable.name.replace('/', '-')}.tunable", directory / "truths.pt"
        file.write_bytes(_pickled(tunable))
        truths.unlink(missing_ok=True)
        self._device = _Process("device", limits, file, truths, policy.build_s + policy.call_s)
        self._pool = [_Process(f"build-{i}", limits, file, None, policy.build_s) for i in range(lanes)]
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._pool:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(max(lanes, 1), thread_name_prefix="build")

    def __enter__(self) -> LiveMeasurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; harmless when they have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in (self._device, *self._pool):
            process.stop(close=True)
        self._threads.shutdown()

    def now(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._started

    def describe(self) -> Described:
        """Where the tunable runs, and on what."""
        found = self._device.call("describe", self._policy.build_s)
        if isinstance(found, Failed):
            raise InputError(f"the device cannot be described: {_told(found)['text']}")
        described: Described = found
        return described

    def measure(self, proposals: Sequence[Proposal], best_s: float | None) -> Iterator[Measurement]:
        """Measure each config once; in the order in which they are built."""
        for proposal, ahead in self._built(proposals):
            found = self._measured(proposal.config, ahead, best_s)
            yield msgspec.structs.replace(found, proposer=proposal.by)
            if found.time is not None:
                best_s = found.time if best_s is None else min(best_s, found.time)

    def finals(self, configs: Sequence[Config], default: Config, seed: int) -> Finals:
        """Prove the default and the best configs on inputs held out, then time them side by side.

        A control takes part: the leading config once more, built as a config of its own. What tells it
        from its twin is chance.

        :param configs: the quickest first.
        """
        for process in self._pool:
            process.stop()  # nothing else runs beside the finals
        self._device.stop()  # nor in a process that a search has used
        cases = prove.held_out(self._tunable, seed)
        wanted = [c for c in configs if key_of(c) != key_of(default)][: self._policy.finalists]
        entries = {"default": Final(config=default, label="default", status="timed")}
        for i, config in enumerate(wanted):
            entries[f"finalist-{i}"] = Final(config=config, label="finalist", status="timed")
        for slot, entry in entries.items():
            entries[slot] = self._held_out(entry, cases)
        right = {key_of(e.config): e for e in entries.values() if e.status == "timed"}
        if right:
            twin = next((right[k] for k in map(key_of, configs) if k in right), entries["default"])
            entries["control"] = msgspec.structs.replace(twin, label="control")
            self._rounds(entries, random.Random(seed))
        return Finals(entries=tuple(entries.values()), cases=tuple(c.name for c in cases))

    def _built(self, proposals: Sequence[Proposal]) -> Iterator[tuple[Proposal, Built | Failed | None]]:
        if not self._pool:
            yield from ((proposal, None) for proposal in proposals)
            return
        futures = {self._threads.submit(self._build_ahead, p.config): p for p in proposals}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()

    def _build_ahead(self, config: Config) -> Built | Failed:
        process = self._idle.get()
        try:
            built: Built | Failed = process.call("build", self._policy.build_s, config=config)
            raised = isinstance(built, Crashed) and built.kind == "exception"
            if raised and process.call("healthy", self._policy.call_s) is not True:
                process.stop()
        finally:
            self._idle.put(process)
        return built

    def _build(self, config: Config) -> Built | Failed:
        """Build where it will be run, in a process that nothing has spoiled."""
        if self._device.call("healthy", self._policy.call_s) is not True:
            self._device.stop()
        built: Built | Failed = self._device.call("build", self._policy.build_s, config=config)
        return built

    def _measured(
        self, config: Config, ahead: Built | Failed | None, best_s: float | None
    ) -> Measurement:
        built = ahead if isinstance(ahead, Failed) else self._build(config)
        if isinstance(built, Failed):
            return Measurement(config=config, **_told(built, building=True))
        kwargs = {"config": config, "policy": self._policy, "best_s": best_s}
        began = time.monotonic()
        found = self._device.call("measure", self._policy.call_s, **kwargs)
        if isinstance(found, Failed):
            found = Measurement(config=config, **_told(found))
        measured: Measurement = msgspec.structs.replace(
            found,
            measure_s=time.monotonic() - began,
            compile_s=(ahead if isinstance(ahead, Built) else built).seconds,
            facts={**built.facts, **found.facts},
        )
        return measured

    def _held_out(self, entry: Final, cases: tuple[Case, ...]) -> Final:
        built = self._build(entry.config)
        if isinstance(built, Failed):
            return msgspec.structs.replace(entry, **_told(built, building=True))
        # other sizes may be compiled anew
        limit_s = self._policy.build_s + self._policy.call_s
        found = self._device.call("hold_out", limit_s, cases=cases, slot="")
        return msgspec.structs.replace(entry, **_told(found), relative=getattr(found, "relative", None))

    def _rounds(self, entries: dict[str, Final], rng: random.Random) -> None:
        """Interleaved rounds in one process, each in a new order; who ends it is out, another begins."""
        done = 0
        self._enter(entries)
        while done < self._policy.rounds and (live := _right(entries)):
            rng.shuffle(live)
            times = {}
            for slot in live:
                found = self._device.call(
                    "sample", self._policy.call_s, slot=slot, flush=self._policy.flush
                )
                if isinstance(found, Failed):
                    self._drop(entries, slot, found)
                    break
                times[slot] = found
            else:  # a round in which one is missing pairs nobody
                done += 1
                for slot, seconds in times.items():
                    so_far = (*entries[slot].seconds, seconds)
                    entries[slot] = msgspec.structs.replace(entries[slot], seconds=so_far)
        for slot in _right(entries):
            found = self._device.call("leave", self._policy.call_s, slot=slot)
            if isinstance(found, Failed) or found.status is not None:
                self._drop(entries, slot, found)

    def _drop(
        self, entries: dict[str, Final], slot: str, found: Failed | Proof, building: bool = False
    ) -> None:
        told = _told(found, building=building)
        entries[slot] = msgspec.structs.replace(entries[slot], **told, seconds=())
        if isinstance(found, Failed):
            self._enter(entries)

    def _enter(self, entries: dict[str, Final]) -> None:
        """A new process that holds all that are still right, built and warmed up."""
        self._device.stop()
        for slot in _right(entries):
            config = entries[slot].config
            found = self._device.call("build", self._policy.build_s, config=config, slot=slot)
            building = isinstance(found, Failed)
            if not building:
                found = self._device.call("enter", self._policy.call_s, slot=slot)
            if isinstance(found, Failed):
                self._drop(entries, slot, found, building)
                return


def _right(entries: dict[str, Final]) -> list[str]:
    return [slot for slot, entry in entries.items() if entry.status == "timed"]


def _told(found: Failed | Proof, building: bool = False) -> dict[str, Any]:
    """Status and sentence."""
    if isinstance(found, Proof):
        return {"status": found.status or "timed", "text": found.text}
    if isinstance(found, TimedOut):
        return {"status": "timed_out", "text": f"no answer within {found.limit_s:g} s ({found.stage})"}
    status = "invalid" if building and found.kind == "exception" else "crashed"
    return {"status": status, "text": f"{' '.join(found.text.split())[:300]} ({found.stage})"}


def _pickled(tunable: Tunable) -> bytes:
    """By reference to modules that another process can import, by value otherwise."""
    import cloudpickle

    functions: list[Any] = [
        tunable.build,
        tunable.inputs,
        tunable.reference,
        tunable.work,
        tunable.limits,
    ]
    functions += [*tunable.space.valid, *tunable.space.derived.values()]
    names = {str(getattr(f, "__module__", "")) for f in functions} - {"__main__"}
    strangers = [sys.modules[name] for name in names & sys.modules.keys() if not _importable(name)]
    for module in strangers:
        cloudpickle.register_pickle_by_value(module)
    try:
        return triton.dumps(tunable)
    # what __reduce__ and __getstate__ of locks, handles, tensor subclasses, ... refuse with
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"tunable {tunable.name!r} cannot be sent to a worker: {error}",
            hint="put its functions in a file that can be imported, and open handles inside of them",
        ) from error
    finally:
        for module in strangers:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    """Whether another process with our path finds a module, and finds the same."""
    top, _, rest = name.partition(".")
    found = importlib.machinery.PathFinder.find_spec(top)
    return found is not None and (
        bool(rest) or found.origin == getattr(sys.modules[top], "__file__", None)
    )
