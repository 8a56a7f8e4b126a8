"""State of the DDP communication hook: one communicator, and memory of its own for every bucket."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist

from tailbound.codec.format import FORMATS
from tailbound.collective import report
from tailbound.collective.communicator import Communicator, Handling, Training
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TailboundError, TransportError
from tailbound.settings.table import Options, config_fields, described, filled, switch_of
from tailbound.torch import interfaces
from tailbound.torch.complaints import Complaints
from tailbound.torch.contribution import Contributions
from tailbound.torch.elastic import is_elastic
from tailbound.torch.memory import Bucket, Memory, check
from tailbound.torch.paths import Paths
from tailbound.torch.recovery import Recovery
from tailbound.transport.config import DEADLINE_MOST, MS, Config
from tailbound.transport.steps import step_of
from tailbound.wire.bits import Bits, as_bits, both_ways

log = logging.getLogger("tailbound")

#: Of the layout of ``state_dict``, and counters of a run that it keeps (``stats()["counters"]``).
FORMAT = 1
_KEPT = ("ops", "ops_incomplete", "ops_late", "rows_expected", "rows_delivered", "abstained", "steps_applied")
#: Jobs made so far by members of a group: all of them agree on the number, other processes need not.
_jobs: Counter[str] = Counter()


class TailboundState(Recovery):
    """What ``allreduce_hook`` needs; make it with ``register`` or by hand before ``register_comm_hook``.

    Args:
        process_group: the group of the DDP model; its store is the rendezvous. Default: the default group.
        model: digest of what is trained (``model_digest``); ranks that differ are refused.
        entries: parameters that are averaged in a step; 0: not known.
        **options: below, or in ``docs/settings.md``. All but ``interface`` are the same on all ranks. One that is left
            out comes from its variable, ``TAILBOUND_...``, or has its default.

    Raises:
        ConfigError, CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        model: str = "",
        entries: int = 0,
        **options: Unpack[Options],
    ) -> None:
        given = filled(options)
        deadline_ms, switch, datapath = given["deadline_ms"], given["switch"], given["datapath"]
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
        period = given["resync_period"]
        super().__init__(dist.get_rank(group), dist.get_world_size(group), (period, given["resync_share"]))
        self.bits = given["bits"]
        up, down = both_ways(self.bits)
        feedback = FORMATS[up].clips if given["error_feedback"] is None else given["error_feedback"]
        self.contributions = Contributions(feedback)
        config = Config(
            rank=self.rank,
            ranks=self.ranks,
            # bytes of the ring that a step takes: rows of 4 bits fill half of theirs
            step=entries * down // 8 if given["ring_mib"] is None else 0,
            deadline_1=int(deadline_ms[0] * MS) if deadline_ms else 0,
            deadline_2=int(deadline_ms[1] * MS) if deadline_ms else 0,
            switch=switch_of(switch) if switch and self.ranks > 1 else None,
            **config_fields({**given, "bits": self.bits}),
        )
        agreed = {"error_feedback": "on" if feedback else "off", "resync_period": str(period)}
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
            interface, datapath = interfaces.own(given["interface"], datapath)
            self.communicator = Communicator(
                dist.distributed_c10d._get_default_store(),
                config,
                datapath=datapath,
                interface=interface,
                name=name,
                timeout=given["timeout"],
                training=Training(model, agreed, elastic=is_elastic(group)),
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
        equal to the others), its number of slices, and what was taken and given. ``device_codec``: what
        codes buckets on devices, by device, ``triton`` or ``host``.
        """
        stats = self.communicator.stats() if self.communicator is not None else report.alone()
        if self.resync is not None:
            stats["replica"] = self.resync.stats()
        stats["history"] = self.history
        if forms := self.paths.forms():
            stats["device_codec"] = forms
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What is worth a checkpoint, in plain types (``torch.load(weights_only=True)``): data to skip, and counters.

        One rank's is enough for all. The loss scale is in the scaler's own ``state_dict``. Scales of the codec,
        deadlines and owner maps belong to one network and one set of ranks, and are learned anew in a few steps.
        """
        counters = self.communicator.job.counters if self.communicator is not None else {}
        run = {"ranks": self.ranks} | {name: int(counters.get(name, 0)) for name in _KEPT}
        owed, history = self.owed_batches, [*self.history, run]
        return {"format": FORMAT, "rank": self.rank, "ranks": self.ranks, "owed_batches": owed, "history": history}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict()`` of an earlier run, also of another rank or world size; before the first step.

        Raises:
            ConfigError: it is no such state, or one of a newer version.
        """
        try:
            known, rank, ranks = (int(state_dict[name]) for name in ("format", "rank", "ranks"))
            owed, history = int(state_dict["owed_batches"]), [dict(run) for run in state_dict["history"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no state of Tailbound ({error!r}): give what state_dict() returned") from error
        if known > FORMAT:
            raise ConfigError(
                f"this state has format {known}, of a newer version (known: {FORMAT}): install that version"
            )
        self.history = history
        if (rank, ranks) == (self.rank, self.ranks):  # another world has another part of the data for each rank
            self.owed_batches = owed

    def close(self, *, farewell: bool = True) -> None:
        """Ends the transport thread and releases the datapath; may be called twice.

        Args:
            farewell: say goodbye; without, the other ranks take this one for dead.
        """
        self.detach()
        if self.communicator is not None:
            self.communicator.close(farewell=farewell)

    def __enter__(self) -> TailboundState:
        return self

    def __exit__(self, raised: object = None, *_: object) -> None:
        self.close(farewell=raised is None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a registered model, or one from a file, has no part in the job: None stands there for the state."""
        return type(None), ()

    def note(self, outcome: Outcome) -> None:
        """Takes in what became of a bucket, and warns."""
        self.last = outcome
        self.note_missing(outcome.missed + outcome.doubtful)
        self.overflow.note(outcome)
        self._complaints.note(outcome)


TailboundState.__doc__ = f"{TailboundState.__doc__}\n    Options:\n{described()}"


def model_digest(model: torch.nn.Module) -> str:
    """Digest of names, shapes and types of the trainable parameters, in order."""
    parts = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in model.named_parameters() if p.requires_grad]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
