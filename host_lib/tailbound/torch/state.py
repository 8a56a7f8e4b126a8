"""State of the DDP communication hook: one communicator, and memory of its own for every bucket."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from tailbound.codec.shape import wide_sums
from tailbound.collective import report
from tailbound.collective.communicator import Communicator, Handling, Training
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TailboundError, TransportError
from tailbound.settings.table import from_environment, switch_of
from tailbound.torch import interfaces, saved
from tailbound.torch.complaints import Complaints
from tailbound.torch.elastic import is_elastic
from tailbound.torch.memory import Bucket, Memory, check
from tailbound.torch.options.contribution import Contributions
from tailbound.torch.paths import Paths
from tailbound.torch.recovery import Recovery
from tailbound.transport.choose import AskedResult
from tailbound.transport.config import DEADLINE_MOST, MS, Authenticate, Config
from tailbound.transport.safeguard import Limits
from tailbound.transport.steps import step_of
from tailbound.wire.bits import Bits, as_bits, both_ways

log = logging.getLogger("tailbound")

#: Jobs made so far by members of a group: all of them agree on the number, other processes need not.
_jobs: Counter[str] = Counter()


class TailboundState(Recovery):
    """What ``allreduce_hook`` needs; make it with ``register`` or by hand before ``register_comm_hook``.

    Options that are not given come from ``TAILBOUND_...`` variables, named like them (``settings.table``).

    Args:
        process_group: the group of the DDP model; its store is the rendezvous. Default: the default group.
        datapath: ``auto`` (``xdp`` where it can be had on ``interface``, else ``udp``), ``xdp`` or ``udp``.
            ``switch``: as ``auto``, with the rows averaged by the switch on the way (``tailbound switch``).
        switch: its address.
        interface: network interface of this rank, or one for each rank of its host, with commas between them;
            default: the way to the rendezvous (MASTER_ADDR).
        port: first of 64 UDP ports of which ``udp`` takes one that is free; 0: any. ``xdp`` has its own.
        mtu: largest IP packet in bytes on the way between any two ranks, the same on all; 0: that of ``interface``. For
            interfaces of different MTU, and tunnels on the way.
        ring_mib: MiB of result rows kept ready to receive; bounds how much is in flight, and how far behind a rank can
            catch up from memory. A model of P parameters takes P bytes a step, with codes of 8 bits. Default: two steps
            of ``entries``, at least 64 and at most 512.
        deadline_ms: how long the first half may wait for contributions after a majority has shown up, and how much
            longer the second half for results; None: learned.
        hadamard: rotate, so that a lost packet costs every entry a little instead of some entries everything.
            ``"auto"``: only while packets are lost, switched at the same op on all ranks.
        safeguard: limits of loss beyond which to skip an op, or to stop (``transport.safeguard.Limits``).
        timeout: seconds to wait for the other ranks at the start.
        start_max: seconds that an op waits at least for a majority of ranks to begin it too. More where ranks begin a
            step far apart (a first step that compiles).
        stage_max: seconds that either half of an op takes at most, and may take in the first ops of a size, in which
            deadlines are learned.
        floor_ms: shortest deadline of a half, ms. What a rank waits until it asks for lost packets is in proportion to
            it. Less than 10 is for fast networks whose steps take less, on hosts with free cores: a thread that runs
            later than this looks like a loss (clock-36).
        strict: seconds that an op waits for every row of every rank that takes part before its deadlines begin; 0: it
            ends by its deadlines alone. The same on all ranks (clock-34).
        fetch: seconds that an op waits at most for results that were lost to come over TCP; 0: it does not (clock-35).
        hold_max: seconds for which the others wait for a rank within ``hold()``, and for its first step.
        model: digest of what is trained (``model_digest``); ranks that differ are refused.
        entries: parameters that are averaged in a step; 0: not known.
        share_rows: agree on owners, so that stragglers and slow links own fewer rows or none (clock-22).
        balance: divide tensors by powers of two before they are rotated together, and multiply them after: small ones
            are then no noise beside large ones; agreed on from the averages of earlier steps (codec-18).
        bits: of a code on the wire, 16, 8 or 4, or (4, 8): 4 of contributions and 8 of results. ``state.bits`` may be
            set between two steps, on all ranks alike.
        fine_steps: in the first so many steps codes have 16 bits, whatever ``bits`` are.
        error_feedback: add what rounding and clipping kept back of a contribution to the next one; default: with
            contributions of 4 bits only.
        resync_period: steps between two comparisons of digests among ranks that have missed nothing (clock-33); 0:
            none.
        resync_share: share of a step for which a rank that has missed results waits for a slice of another's state, one
            in each step (clock-21); 0: it takes none, but for ``synchronise`` and where it is lost.
        result: how averaged rows come to the other ranks: a send to each (``peers``), one burst that the kernel
            (``fanout``) or the network (``multicast``) multiplies, or ``auto``, the best of what can be had.
        source_ports: UDP source ports of what is sent to one rank over xdp, so that its receive-side scaling spreads
            it; 0: by the number of ranks.
        rate: bit/s of this rank's link: sending begins there, and is never faster; 0: what its driver says.
        dscp: class of the packets of this job (DSCP, 0 to 63), for switches that keep one apart.
        multicast_group: IPv4 group of the job, the same on all ranks; empty: one that follows from its cookie.
        authenticate: refuse packets and requests that were not made with the job's key; ``auto``: where there is a
            ``key_file``; ``workers``: but for what goes to and comes from the switch, which has none
            (docs/security.md).
        key_file: file with the job's key, the same on all ranks: 32 bytes, or as many in hexadecimal digits. Without
            one and with ``authenticate="on"`` rank 0 draws it and hands it over the store.
        codec_threads: threads that code an op, the transport's own included; 0: one for each four of this rank's cores,
            at most four.

    Raises:
        ConfigError, CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """

    @from_environment
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        datapath: str = "auto",
        switch: str | None = None,
        interface: str | None = None,
        port: int = 0,
        mtu: int = 0,
        ring_mib: float | None = None,
        deadline_ms: tuple[float, float] | None = None,
        hadamard: bool | Literal["auto"] = True,
        safeguard: Limits | None = None,
        timeout: float = 180.0,
        start_max: float = 1.0,
        stage_max: float = 2.0,
        floor_ms: float = 10.0,
        strict: float = 0.0,
        fetch: float = 0.2,
        hold_max: float = 60.0,
        model: str = "",
        entries: int = 0,
        share_rows: bool = True,
        balance: bool = False,
        bits: Bits = 8,
        fine_steps: int = 0,
        error_feedback: bool | None = None,
        resync_period: int = 200,
        resync_share: float = 0.05,
        result: AskedResult = "auto",
        source_ports: int = 0,
        rate: int = 0,
        dscp: int = 0,
        multicast_group: str = "",
        authenticate: Authenticate = "auto",
        key_file: str = "",
        codec_threads: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("call torch.distributed.init_process_group before tailbound: its store is the rendezvous")
        group = process_group or dist.group.WORLD
        if group is None:
            raise ConfigError("there is no process group: pass process_group=, or make a default one")
        if deadline_ms and deadline_ms[0] * MS > DEADLINE_MOST:
            raise ConfigError(f"deadline_ms begins with {deadline_ms[0]:g}: give {DEADLINE_MOST / MS:g} ms at most")
        if is_elastic(group) and (switch or datapath == "switch"):
            raise ConfigError(
                "a rank that has died comes back between two steps: use no switch, or "
                "torch.distributed.init_process_group"
            )
        super().__init__(dist.get_rank(group), dist.get_world_size(group), (resync_period, resync_share))
        self.bits = bits
        up, down = both_ways(self.bits)
        feedback = up == 4 if error_feedback is None else error_feedback
        self.contributions = Contributions(feedback)
        config = Config(
            rank=self.rank,
            ranks=self.ranks,
            port=port,
            mtu=mtu or 0,
            ring_mib=Config.ring_mib if ring_mib is None else ring_mib,
            # bytes of the ring that a step takes: rows whose 4 bits are summed in wide lanes fill half of theirs
            step=entries * (8 if wide_sums(self.bits, self.ranks) else down) // 8 if ring_mib is None else 0,
            deadline_1=int(deadline_ms[0] * MS) if deadline_ms else 0,
            deadline_2=int(deadline_ms[1] * MS) if deadline_ms else 0,
            start_max=int(start_max * 1000 * MS),
            stage_max=int(stage_max * 1000 * MS),
            floor=int(floor_ms * MS),
            strict=int(strict * 1000 * MS),
            fetch=int(fetch * 1000 * MS),
            hold_max=int(hold_max * 1000 * MS),
            rotate=hadamard,
            safeguard=safeguard or Limits(),
            share_rows=share_rows,
            balance=balance,
            result=result,
            source_ports=source_ports,
            rate=rate / 8,
            dscp=dscp,
            group=multicast_group,
            switch=switch_of(switch) if switch and self.ranks > 1 else None,
            bits=self.bits,
            fine_steps=fine_steps,
            authenticate=authenticate,
            key_file=key_file,
            codec_threads=codec_threads,
        )
        options = {
            "error_feedback": "on" if feedback else "off",
            "resync_period": str(resync_period),
        }
        members = f"{group.group_name}/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
        name = f"tailbound/{members}/{_jobs[members]}"
        _jobs[members] += 1
        self.group = group
        #: all ranks whose gradients are averaged, in whatever way
        self.everyone = group
        #: how buckets go through the engine, by their device
        self.paths = Paths()
        self._complaints = Complaints(self.rank)
        self.complain, self.say = self._complaints.complain, self._complaints.say
        self.last = Outcome()
        if self.ranks > 1:
            interface, datapath = interfaces.own(interface, datapath)
            self.communicator = Communicator(
                dist.distributed_c10d._get_default_store(),
                config,
                datapath=datapath,
                interface=interface,
                name=name,
                timeout=timeout,
                training=Training(model, options, elastic=is_elastic(group)),
                on_thread=lambda: torch.set_num_threads(1),
            )
            self._endings.append(self.communicator.close)
            log.info("rank %d of %d: tailbound over %s", self.rank, self.ranks, self.communicator.datapath)

    def average(self, index: int, tensor: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Starts averaging one bucket; the future completes in bounded time with a tensor like ``tensor``.

        That is ``tensor`` itself, averaged in place and never written afterwards.

        Raises:
            ConfigError: a bucket of a type, layout or device that is not supported.
            LayoutError: ranks disagree on an earlier op.
            TransportError: the transport has ended.
        """
        check(index, tensor)
        if index == 0:
            self.before_backward()
        return self._average(index, tensor, last)

    @property
    def bits(self) -> Bits:
        """Of a code, from the next step on; the same on all ranks.

        Raises:
            ConfigError: set to what codes cannot have.
        """
        return self._bits

    @bits.setter
    def bits(self, given: Bits) -> None:
        self._bits = as_bits(given)

    def _average(self, index: int, tensor: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        path = self.paths.of(tensor.device)
        future = path.stream.future()
        if self.communicator is None:
            future.set_result(tensor)
            return future
        if self.outside or self.void.on:
            if self.void.on:
                tensor.detach().zero_()
                if last:
                    self.void.made()
            future.set_result(tensor)
            if last:
                self.rehearsed()
            return future
        bucket, scale = self.memory_of(index, tensor.numel(), tensor.dtype, tensor.device), self.loss_scale
        decoded, result = bucket.targets(tensor.detach())
        contribution = self.contributions.begin(index, tensor, last, bucket, 1 / scale)
        prepare, residual = contribution.prepare, contribution.residual
        mark = path.stream.mark()
        if last:
            self._prepare(False)
        errors: list[TailboundError] = []

        def done(outcome: Outcome) -> None:
            if outcome.error is not None:
                errors.append(outcome.error)
            if scale != 1.0:
                decoded.mul_(scale)
            if result is not decoded:
                result.copy_(decoded)
            self.applied(outcome, last)
            if last:
                self.turns.passed(inside=bool(self._stepping))
            future.set_result(result)

        def complete(outcome: Outcome) -> None:
            # a future that never completes would hang DDP, and what a failed device refuses may be anything in here
            try:
                path.within(done)(outcome)
            except Exception as error:
                text = f"rank {self.rank}: the average of bucket {index} cannot be handed over on {tensor.device}"
                advice = "look at what the device said first, then restart all ranks"
                errors.append(TransportError(f"{text}: {error}; {advice}"))
                if not future.done():
                    try:
                        future.set_result(result)  # and ``checked`` raises: an error known before, not after it
                    except Exception:
                        future.set_exception(errors[0])  # type: ignore[arg-type]
                raise

        self.communicator.launch(
            index,
            path.values(contribution.source),
            path.values(decoded),
            last=last,
            done=complete,
            prepare=path.within(prepare, mark) if prepare is not None else None,
            contribute=not self.abstaining,
            handling=Handling(
                str(tensor.dtype).removeprefix("torch."),
                path.coder(mark),
                path.values(residual) if residual is not None else None,
                self.bits,
                self.scaler is not None,
                self.layout.starts(index, tensor.numel()),
                self.layout.parts(index),
            ),
        )

        def checked(completed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # raising here, after completion, reaches backward() with this message; set_exception would not
            if errors:
                raise errors[0]
            return completed.value()  # or its own error

        return future.then(checked)

    def applied(self, outcome: Outcome, last: bool) -> None:
        """An average is handed out to be applied; ``last``: it ends the step."""
        self.note(outcome)
        if last:
            self.stepped = False
            self.ended = step_of(outcome.label)

    def memory_of(
        self, index: int, numel: int, dtype: torch.dtype, device: torch.device, memory: Memory | None = None
    ) -> Bucket:
        """Memory of a bucket on ``device``, out of ``memory`` if that is given.

        What is divided by a loss scale is decoded in float32 in any case.
        """
        native = dtype in self.paths.of(device).native and self.loss_scale == 1.0
        return (memory or self.memory).of(index, numel, dtype, device, native=native)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, in plain types (``tailbound.collective.report.snapshot``), of zero for one rank.

        ``replica`` tells of re-synchronisation: whether this replica is sound (has missed no result since it was last
        equal to the others), how many of its slices may differ, and what was taken and given. ``device_codec``: what
        codes buckets on devices, by device, ``triton`` or ``torch``.
        """
        stats = self.communicator.stats() if self.communicator is not None else report.alone()
        if self.resync is not None:
            stats["replica"] = self.resync.stats()
        if self.entrance is not None:
            stats["entrance"] = {"outside": self.outside, "alone": self.entrance.alone} | dict(self.entrance.counters)
        stats["history"] = self.history
        if forms := self.paths.forms():
            stats["device_codec"] = forms
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What is worth a checkpoint, in plain types (``torch.load(weights_only=True)``; see ``saved``).

        One rank's is enough for all. The loss scale is in the scaler's own ``state_dict``.
        """
        return saved.save(self, self.communicator.job.counters if self.communicator is not None else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict()`` of an earlier run, also of another rank or world size; before the first step.

        Raises:
            ConfigError: it is no such state, or one of a newer version.
        """
        saved.restore(self, state_dict)

    def close(self) -> None:
        """Ends the transport thread and releases the datapath; may be called twice."""
        self.detach()
        if self.communicator is not None:
            self.communicator.close()

    def __enter__(self) -> TailboundState:
        return self

    def __exit__(self, raised: object = None, *_: object) -> None:
        if raised is not None and self.communicator is not None:
            self.detach()
            self.communicator.__exit__(raised)
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a registered model, or one from a file, has no part in the job: None stands there for the state."""
        return type(None), ()

    def note(self, outcome: Outcome) -> None:
        """Takes in what became of a bucket, and warns."""
        self.last = outcome
        self.note_missing(outcome.missed)
        self.overflow.note(outcome)
        self._complaints.note(outcome)


def model_digest(model: torch.nn.Module) -> str:
    """Digest of names, shapes and types of the trainable parameters, in order."""
    parts = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in model.named_parameters() if p.requires_grad]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
