"""One rank's handle on a job: opens a datapath, meets the other ranks, averages buckets.

This is the whole of Tailbound without PyTorch: arrays in, averaged arrays out, over any ``rendezvous.Store``.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

import tailbound
from tailbound.codec.format import check_bits
from tailbound.codec.halves import BFLOAT16, FLOAT16, FLOAT32, Floats
from tailbound.codec.records import Coding
from tailbound.codec.shape import GROUP_ROWS, cut_tensors, layout_tag, row_entries, shape_for
from tailbound.codec.threads import cores_here, threads_for
from tailbound.collective import comeback, report
from tailbound.collective.coder import HOST, Coder, Values
from tailbound.collective.comeback import Part
from tailbound.collective.job import Job
from tailbound.collective.op import Launch, Outcome
from tailbound.collective.transpose import Transpose
from tailbound.collective.warmup import announce_compilation, warm_up
from tailbound.datapath.protocol import Datapath
from tailbound.datapath.select import open_datapath
from tailbound.errors import ConfigError, LayoutError
from tailbound.observe.status import StatusWriter
from tailbound.observe.trace import TRACE_VARIABLE
from tailbound.transport import keys, rendezvous
from tailbound.transport.config import DEFAULT_PORT, Config
from tailbound.transport.reliable import Reliable
from tailbound.transport.rendezvous import Greeting, Store
from tailbound.transport.sender import Sender
from tailbound.transport.sequence import Layout
from tailbound.transport.sockets import prepare_rows
from tailbound.transport.steps import step_of
from tailbound.wire.address import words_of
from tailbound.wire.bits import Bits, number_of
from tailbound.wire.schema import OP_INDEX_BITS

log = logging.getLogger("tailbound")

#: An op has at most this many rows, so that either half of it ends well before ``stage_max``: 8192 rows of 1408 codes
#: take a second at 100 Mbit/s. Rows of an owner fit the header's u16, too, and needs one READY packet.
MAX_OP_ROWS = 8192
#: Seconds for which a program that ends without ``close()`` answers the others.
_ANSWERS = 0.5
#: Ops that a step can number.
MAX_STEP_OPS = 1 << OP_INDEX_BITS


class Handling(NamedTuple):
    """How a bucket is read, coded and written. ``dtype``, ``bits``, ``scaled`` and ``parts`` are equal on all ranks.

    Attributes:
        dtype: the bucket's own type, part of the layout tag.
        coder: for ``data`` and ``out`` in other memory than numpy's: who reads and writes them.
        residual: f32[n] of its own, C-contiguous; written in the transport thread when ``data`` has been coded, with
            what the codes leave out (``codec.feedback``) of a ``data`` of float32; left alone where nothing was coded.
        bits: of a code, or of contributions' and of results'; 0: ``config.bits``. All ranks must give the same.
        scaled: ``data`` is a gradient without its loss scale; all ranks must say the same.
        starts: where the tensors in the bucket begin, rising; empty: they are not known.
        parts: names what is in ``data`` and in which order, part of the layout tag: ranks that differ are refused.
        quorum: an average that fewer than a majority of the ranks have part in is void (clock-38); False where it
            belongs to no step of training.
    """

    dtype: str = "float32"
    coder: Coder = HOST
    residual: Values | None = None
    bits: Bits = 0
    scaled: bool = False
    starts: tuple[int, ...] = ()
    parts: str = ""
    quorum: bool = True


_PLAIN = Handling()


class Communicator:
    """Averages float32 arrays over all ranks in bounded time.

    Args:
        store: any ``rendezvous.Store``, as ``torch.distributed`` has.
        config: settings; ``rank`` and ``ranks`` among them. A ``switch`` averages whatever the datapath.
        datapath: ``auto``, ``xdp`` or ``udp``.
        interface: name of the interface to use; default ``TAILBOUND_INTERFACE``, else the way to the store's host, or
            to MASTER_ADDR.
        name: tells several jobs on one store apart.
        timeout: seconds to wait for the other ranks at the start.
        model: digest of what is trained; like ``options`` it is alike on all ranks: those that differ are refused.
        options: settings of the caller, by name and in words, beside those of ``config``.
        elastic: a rank that has died may come back (``comeback``).
        on_thread: called once in the transport thread.

    Raises:
        ConfigError, CapabilityError, AttachError: this rank cannot take part, and why.
        LayoutError, TransportError: the ranks do not fit together, or one is missing.
    """

    def __init__(
        self,
        store: Store,
        config: Config,
        *,
        datapath: str = "auto",
        interface: str | None = None,
        name: str = "tailbound",
        timeout: float = 180.0,
        model: str = "",
        options: Mapping[str, str] = MappingProxyType({}),
        elastic: bool = False,
        on_thread: Callable[[], None] | None = None,
    ) -> None:
        check_bits(config.bits, switched=config.switch is not None)
        self._store, self._prefix = store, name
        #: ranks that have died may come back
        self.elastic = elastic
        announce_compilation(config.rank)
        self._closed, self._farewell = False, True
        interface = interface or os.environ.get("TAILBOUND_INTERFACE")
        before = rendezvous.under_way(store, config.rank, config.ranks, name) if elastic else None
        was = json.loads(before[config.rank]) if before is not None else {}
        #: in the job; a rank that is outside is to ``enter``
        self.part = Part.BEGINS if before is None else Part.UNKNOWN
        self.config = config
        peers = [rank for rank in range(config.ranks) if rank != config.rank]
        with contextlib.ExitStack() as opened:
            if before is None:
                opened.push(self._tell_failed)
            path = open_datapath(datapath, interface, config, rendezvous.host_of(store), int(was.get("port", 0)))
            opened.callback(path.close)
            self.config = config = dataclasses.replace(config, width=path.store.width)
            self._row_width = config.switch.width(config.width) if config.switch is not None else config.width
            #: requests to other ranks outside the data path (clock-20, clock-21)
            self.reliable = Reliable(path.endpoint[0], int(was.get("reliable", 0)))
            opened.callback(self.reliable.close)
            master = keys.agree(store, name, config.rank, timeout, config.key_file)
            own, verify = self._greeting(path, model, {**config.common(), **options}), None
            if master is not None:
                own, verify = keys.sign(master, own), partial(keys.verify, master)
            if before is None:
                self.greetings = rendezvous.exchange(store, own, name, timeout, verify)
            else:
                self.greetings = rendezvous.come_back(own, before, verify)
            secret = b"" if master is None else keys.session(master, self.greetings)
            first = self.greetings[0].cookie  # of the reliable path as long as the store lasts
            life = comeback.Life(self.part, first if before is None else rendezvous.new_cookie())
            ring: keys.KeyRing | None = None

            def alive() -> comeback.Life:
                step = step_of(self.job.sequence.upcoming) if self.part == Part.INSIDE else 0
                return comeback.Life(self.part, life.cookie, ring.turns if ring else 0, step)

            comeback.tell(self.reliable, alive)
            reached = [(g.address, g.reliable) for g in self.greetings]
            self.reliable.start(first, config.rank, reached, keys.path_key(secret) if secret else b"")
            if before is not None:
                found = comeback.find_part(config.rank, life.cookie, peers, self.reliable.pull, timeout)
                life = found if found.part == Part.OUTSIDE else life._replace(cookie=found.cookie)
                self.part = found.part
                self.config = config = dataclasses.replace(config, first_step=found.step or config.first_step)
            if secret:
                ring = keys.KeyRing(secret, life.cookie, config.width, life.turns, install=path.put_key)
            self.job = self._activate(path, life.cookie, ring)
            opened.callback(self.job.threads.close)
            opened.callback(self.job.channels.close)
            early: list[bytes] = []
            if before is None:
                rendezvous.share(store, "active", "here", config.rank, config.ranks, name, timeout)
                early = self.job.paths.prove(path, store, name, self.greetings, timeout)
                if elastic:
                    rendezvous.begin(store, name)
            opened.pop_all()
        if config.rank == 0 and config.ranks > 1:  # a warning: that much is seen by default
            log.warning("tailbound averages gradients over %s", rendezvous.datapaths(self.greetings))
        results, sums = self.job.least_rings
        if results < self.job.store.result_rows:
            log.warning(
                "rank %d: its result ring has %d rows, another rank's %d, and no more than those is in flight: "
                "give every rank the same ring_mib, and `tailbound attach` the same --ring on every host",
                config.rank,
                self.job.store.result_rows,
                results,
            )
        rings = [results // 2, sums * config.ranks // 2]
        if config.switch is not None:
            rings.append(config.switch.rows // 2)
        self._number(*rings)
        least, outside = -(-self._rows_most // sums), self.part == Part.OUTSIDE
        self._engine = Transpose(self.job, on_thread, early, owners_least=least, outside=outside).start()
        # ends the transport, which says goodbye and lingers
        self.reliable.before_close(lambda: self._engine.close(2 * config.bound / 1e9, farewell=self._farewell))
        comeback.serve(self.reliable, self._engine)
        comeback.watch(self.reliable, self._engine)
        if self.part == Part.BEGINS:  # who comes back into a job connects when it is taken in
            # where all processes begin anew no rank knows who of the others had been connected to the one before
            others = [peer for peer in peers if peer > config.rank or before is not None]
            comeback.connect(self.reliable, config.rank, others, timeout)
        self._status = StatusWriter(f"{self.job.cookie:08x}-{config.rank}", lambda: report.status(self.job))
        _open.add(self)

    def _tell_failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Whoever waits for this rank is told that it cannot take part."""
        if error is not None:
            rendezvous.tell_failed(self._store, self._prefix, self.config.rank, error)

    def _number(self, *rows: int) -> None:
        """Begins to number what is launched; an op has at most ``rows``, and groups whose needs READY has room for."""
        self._groups_most = self._row_width // 2
        self._rows_most = min(MAX_OP_ROWS, GROUP_ROWS * self._groups_most, *rows)
        self._layouts = lru_cache(maxsize=4096)(self._laid_out)
        self._lock = threading.Lock()
        self._launched = 0  # ops of the present step

    def _greeting(self, path: Datapath, model: str, options: Mapping[str, str]) -> Greeting:
        """What this rank says of itself."""
        config, (address, port) = self.config, path.endpoint
        drawn = (config.switch is not None and config.switch.cookie) or rendezvous.new_cookie()
        return Greeting(
            rank=config.rank,
            ranks=config.ranks,
            version=tailbound.__version__,
            address=address,
            port=port,
            width=path.store.width,
            rows=path.store.result_rows,
            sum_rows=path.store.sum_rows,
            datapath=path.name,
            model=model,
            options=options,
            cookie=drawn if config.rank == 0 else 0,
            reliable=self.reliable.port,
            switch=str(config.switch or ""),
        )

    def _activate(self, path: Datapath, cookie: int, ring: keys.KeyRing | None) -> Job:
        """Lets packets in; the job."""
        address, _ = path.endpoint
        everybody = [(g.address, g.port) for g in self.greetings]
        if (switch := self.config.switch) is not None:
            everybody.append((switch.address, switch.port or self.config.port or DEFAULT_PORT))
        endpoints = {rank: endpoint for rank, endpoint in enumerate(everybody) if rank != self.config.rank}
        here = sum(g.address == address for g in self.greetings)
        threads = threads_for(self.config.codec_threads, cores_here(), here)
        self.config = dataclasses.replace(self.config, codec_threads=threads)
        sockets = path.sending(len(endpoints)) if endpoints else [path.socket]
        job = Job(self.config, path, Sender(sockets, endpoints), cookie, keys=ring)
        job.least_rings = min(g.rows for g in self.greetings), min(g.sum_rows for g in self.greetings)
        warm_up(job)
        job.activate([words_of(host) for host, _ in everybody], words_of(address))
        job.channels.open(alone=bool(endpoints) and all(g.datapath != "udp" for g in self.greetings))
        for sock in job.sender.sockets:
            prepare_rows(cast(socket.socket, sock), self.config.dscp)
        return job

    @property
    def datapath(self) -> str:
        """Name of the datapath in use; with a switch ``switch-xdp`` or ``switch-udp``."""
        return self.job.datapath.name if self.job.switch is None else f"switch-{self.job.datapath.name}"

    def allreduce(self, data: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> Future[Outcome]:
        """Averages ``data`` (f32[n], contiguous) over all ranks into ``out`` (default: in place).

        Every rank must call it for the same sizes in the same order. Returns a future of the ``Outcome``, which always
        completes: within ``config.bound`` and the time to decode, once those launched before have made room.
        """
        done: Future[Outcome] = Future()
        self.launch(0, data, data if out is None else out, last=True, done=done.set_result)
        return done

    def launch(
        self,
        bucket: int,
        data: Values,
        out: Values,
        *,
        last: bool,
        done: Callable[[Outcome], None],
        prepare: Callable[[], None] | None = None,
        contribute: bool = True,
        handling: Handling = _PLAIN,
    ) -> None:
        """Starts averaging one bucket; ``done`` is called once in the transport thread.

        Args:
            bucket: index of the bucket in its step; buckets are launched in the same order on all ranks.
            data: [n], float32 or of ``handling.dtype`` (``codec.halves``), C-contiguous, not to be written until
                ``done``; all of it is read in the transport thread.
            out: [n], float32 or of ``handling.dtype``, C-contiguous; may be ``data`` itself.
                After an error it has the own values, or averages.
            last: whether this ends the step.
            done: gets the ``Outcome``, merged over the ops of the bucket.
            prepare: called in the transport thread before ``data`` is read for the first time.
            contribute: False to take part without rows: the others neither wait for this rank nor count it.
            handling: of the bucket.

        Raises:
            ConfigError: arrays of another type, shape or size, or more ops in a step than ``MAX_STEP_OPS``.
            TransportError, LayoutError: see ``Transpose.launch``.
        """
        dtype, coder, residual, bits, scaled, starts, parts, quorum = handling
        numel = data.size if coder is HOST else len(data)
        if coder is HOST:
            half = _HALVES.get(dtype)
            _check(data, "data", numel, half if residual is None else None)
            _check(out, "out", numel, half)
            if residual is not None:
                _check(residual, "residual", numel)
        layouts = self._layouts(bucket, numel, bits or self.config.bits, dtype, scaled, starts, parts, last)
        merged = done if len(layouts) == 1 else _Merge(len(layouts), done)
        if coder.ahead:
            for layout in layouts:
                coder.warm_up(data, out, layout.shape, Coding(0, rotate=self.config.rotate))
        with self._lock:
            if self._launched + len(layouts) > MAX_STEP_OPS:
                raise ConfigError(
                    f"bucket {bucket} begins at op {self._launched} of its step and needs {len(layouts)}, of "
                    f"{MAX_STEP_OPS} that a step can have: make buckets (DDP's bucket_cap_mb) or the ring larger"
                )
            self._launched = 0 if last else self._launched + len(layouts)
            hi = 0
            for layout in layouts:
                lo, hi = hi, hi + layout.shape.numel
                self._engine.launch(
                    Launch(
                        layout,
                        data[lo:hi],
                        out[lo:hi],
                        merged,
                        self.job.now(),
                        prepare if lo == 0 else None,
                        contribute,
                        coder,
                        residual[lo:hi] if residual is not None else None,
                        quorum,
                    )
                )

    def _laid_out(
        self, bucket: int, numel: int, bits: Bits, dtype: str, scaled: bool, starts: tuple[int, ...], parts: str,
        last: bool,
    ) -> tuple[Layout, ...]:  # fmt: skip
        """The ops of a bucket, in the order of its entries; see ``Handling``.

        Raises:
            ConfigError: more than a step can number, or bits that a switch does not sum.
        """
        config, chunks, found = self.config, self._cut(numel, bits, starts), list[Layout]()
        check_bits(bits, switched=config.switch is not None)
        kind = f"{dtype} {parts}" if parts else dtype
        mode = int(config.rotate) | number_of(bits) << 2 | scaled << 7
        mode |= (crc32(parts.encode()) & 0xFFFF) << 8  # other tensors, or the same in another order, have other scales
        for chunk, (lo, hi, tensors) in enumerate(chunks):
            shape = shape_for(hi - lo, self._row_width, bits, tensors)
            ends = last and hi == numel
            tag = layout_tag(
                bucket=bucket, whole=numel, numel=shape.numel, dtype=kind, chunk=chunk, world_size=config.ranks,
                width=shape.width, mode=mode, last=ends, runs=shape.runs,
            )  # fmt: skip
            found.append(Layout((bucket, numel, chunk, mode), shape, tag, ends))
        return tuple(found)

    def ops(self, numel: int) -> int:
        """Into how many ops a bucket of ``numel`` entries is cut whose tensors are not known, in ``config.bits``.

        Raises:
            ConfigError: more than a step can number.
        """
        return len(self._cut(numel, self.config.bits))

    def rings(self, tensors: tuple[int, ...]) -> tuple[int, int, int]:
        """Rows of a step of ``tensors`` (entries of each), rows of the result ring, and bytes of both rings.

        Those of the step about: tensors begin rows of their own, and flat ops are filled up to whole groups.
        """
        store = self.job.store
        *starts, numel = accumulate(tensors, initial=0)
        chunks = self._cut(numel, self.config.bits, tuple(starts))
        rows = sum(shape_for(hi - lo, self._row_width, self.config.bits, sizes).rows for lo, hi, sizes in chunks)
        return rows, store.result_rows, store.results.nbytes + store.sums.nbytes

    def _cut(self, numel: int, bits: Bits, starts: tuple[int, ...] = ()) -> tuple[Chunk, ...]:
        limits = row_entries(self._row_width, bits), self._rows_most, self._groups_most
        return _chunks(numel, starts, *limits)

    def drain(self, timeout: float = 10.0) -> bool:
        """Waits until nothing is in flight here; returns False if it took longer than ``timeout`` seconds."""
        return self._engine.drain(timeout)

    @property
    def behind(self) -> int:
        """Steps by which the newest live rank is ahead of this one (clock-20); 0 in step."""
        return self.job.steps.behind

    @property
    def lost(self) -> bool:
        """Whether this rank is so far behind that results it needs have left the ring: it has to ``jump``."""
        return self.job.steps.lost or self.job.sequence.adrift

    def begun(self) -> bool:
        """Whether a live peer has begun the step that is launched here next, or a later one."""
        job = self.job
        before = job.sequence.upcoming - 1 & 0xFFFFFFFF
        return job.newest(before) != before

    def jump(self) -> int:
        """If this rank is lost, leaves behind what cannot be had any more and joins the others in their step.

        To be called between two steps, with nothing in flight. Its parameters are then out of date: it should take
        part with ``contribute=False`` until they have been synchronized.

        Returns:
            Steps skipped: 0 if it was not lost.

        Raises:
            TransportError: no live rank could say where to join.
        """
        return comeback.jump(self._engine, self.reliable.pull) if self.lost else 0

    def entrance(self) -> bytes:
        """Where the job goes on after this rank's last step, for a rank that is outside: what its ``enter`` takes."""
        found = self._engine.ask(lambda: comeback.entrance(self._engine))
        return comeback.encode(found, self.job.world)

    def enter(self, entrance: bytes) -> set[int]:
        """Takes part from the step on that a live rank told (``entrance``), which does not begin it meanwhile.

        Returns:
            The ranks that know of it, and wait for this one from now on.

        Raises:
            LayoutError: the job has begun anew since this process came back.
            TransportError: no entrance, or ops are in flight here.
        """
        found, engine = comeback.decode(entrance, self.job.world), self._engine
        if found.cookie != self.job.cookie:
            raise LayoutError(
                f"rank {self.config.rank} came back into a run of the job that has ended, all other ranks have begun "
                "anew since: start this rank again"
            )
        engine.ask(lambda: engine.enter(found.position, found.away))
        # processes that have ended may be back, too, and refuse at once where they are not
        here = comeback.ask_all(engine, self.reliable, found.position.step, found.dead - found.away)
        self.part = Part.INSIDE
        return here

    @property
    def step(self) -> int:
        """Step of the op that is launched here next."""
        return step_of(self._engine.ask(lambda: self.job.sequence.upcoming))

    def hold(self, on: bool) -> None:
        """Says to the others that this rank is alive but between steps (evaluation, checkpoint), or no longer.

        While it lasts, and at most ``config.hold_max``, they wait for it instead of leaving it out (clock-16).
        """
        self._engine.hold(on)

    def meet(self, name: str, timeout: float = 60.0) -> None:
        """Waits for all ranks at a point outside the data path (before reading final counters, say)."""
        rendezvous.share(self._store, name, "here", self.config.rank, self.config.ranks, self._prefix, timeout)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, in plain types (see ``report.snapshot``)."""
        found = report.snapshot(self.job, self.greetings)
        found["counters"] |= self.reliable.counts()
        return found

    def close(self, *, farewell: bool = True) -> None:
        """Says goodbye and releases everything; may be called twice. Unfinished ops end first, in bounded time.

        A program that ends without it, or an exception that leaves a ``with`` of this, does not say goodbye: to the
        other ranks that is the death of this one.

        Args:
            farewell: say goodbye.
        """
        if self._closed:
            return
        self._closed, self._farewell = True, farewell
        _open.discard(self)
        self._status.close()
        if (trace := self.job.accounts.trace) is not None:
            where = os.environ.get(TRACE_VARIABLE, "")
            name = f"tailbound-{self.job.cookie:08x}-rank{self.config.rank}.json"
            try:
                trace.write(Path(where, name), self.job.events.recent())
            except OSError as error:
                log.warning("rank %d: no trace in %s: %s", self.config.rank, where, error)
        self.reliable.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, raised: object = None, *_: object) -> None:
        self.close(farewell=raised is None)


#: What entries of half precision are in numpy.
_HALVES = {"bfloat16": BFLOAT16, "float16": FLOAT16}


def _check(array: Floats, name: str, size: int, half: np.dtype[Any] | None = None) -> None:
    """Refuses what cannot be coded in place.

    Raises:
        ConfigError: neither float32 nor ``half``, not one-dimensional and contiguous, empty, or of another size.
    """
    if array.dtype not in (FLOAT32, half or FLOAT32) or array.ndim != 1 or not array.flags.c_contiguous:
        raise ConfigError(
            f"{name} is {array.dtype} of shape {array.shape}: give a contiguous one-dimensional float32 array"
        )
    if size == 0 or array.size != size:
        raise ConfigError(f"{name} has {array.size} entries: give at least one, and as many for out as for data")


#: Entries of a bucket that are an op, from and to, and those of each tensor, or part of one, in it.
Chunk: TypeAlias = tuple[int, int, tuple[int, ...]]


@lru_cache(maxsize=4096)
def _chunks(numel: int, starts: tuple[int, ...], width: int, rows_most: int, groups_most: int) -> tuple[Chunk, ...]:
    """The ops of a bucket whose tensors begin at ``starts``; none: they are not known.

    Raises:
        ConfigError: more ops than a step can number.
    """
    sizes = tuple(hi - lo for lo, hi in pairwise((*starts, numel)) if hi > lo) or (numel,)
    if not starts:  # rows come in whole groups
        rows_most = rows_most // GROUP_ROWS * GROUP_ROWS or rows_most
    found, lo = [], 0
    for tensors in cut_tensors(sizes, width, rows_most, groups_most):
        hi = lo + sum(tensors)
        found.append((lo, hi, tensors if starts else ()))
        lo = hi
    if len(found) > MAX_STEP_OPS:
        raise ConfigError(f"a bucket of {numel} entries needs {len(found)} ops: give a larger ring")
    return tuple(found)


class _Merge:
    """Calls ``done`` once all ops of a bucket are over, with their outcomes as one."""

    def __init__(self, parts: int, done: Callable[[Outcome], None]) -> None:
        self._left, self._done, self._whole = parts, done, Outcome(unsent=True)

    def __call__(self, outcome: Outcome) -> None:
        self._left -= 1
        self._whole.add(outcome)
        if self._left == 0:
            self._done(self._whole)


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def jobs_here() -> int:
    """How many jobs this process takes part in."""
    return len(_open)


def _close_all() -> None:
    """A daemon thread inside torch's future code at interpreter exit would abort the process: stop it before.

    A program that ends without ``close()`` may have failed, so it says no farewell. Where no exception has ended it, it
    answers for a while longer: others may still lack results of its last step.
    """
    if _open and getattr(sys, "last_value", None) is None:  # set where an exception ends a program
        time.sleep(_ANSWERS)
    for communicator in list(_open):
        communicator.close(farewell=False)


atexit.register(_close_all)


def _forget() -> None:
    """A forked child has no part in the jobs of its parent: it must say no goodbye in its name, nor launch anything."""
    for communicator in list(_open):
        communicator._closed = communicator._engine._closing = True
    _open.clear()


os.register_at_fork(after_in_child=_forget)
