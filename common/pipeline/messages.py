"""Activations and their gradients on the way between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.pipeline.schedule import Action, Schedule
from common.runtime import Runtime

Direction = Literal["forward", "backward"]


class Message(NamedTuple):
    """What a stage is to be given."""

    direction: Direction
    stage: int
    """That receives it."""
    micro_batch: int


class Channel(NamedTuple):
    """One way from one rank to another; messages keep their order."""

    direction: Direction
    source: int
    destination: int


class Channels:
    """Process groups for the messages of a pipeline, made once, by all ranks together.

    Each group carries one way only between any two ranks, so that a receive that was posted early can hold up no send,
    whatever the backend (NCCL carries out what concerns two ranks in order). Two ranks with virtual stages send
    activations both ways and take two groups for each direction.
    """

    def __init__(self, runtime: Runtime, *, virtual: int, axis: str = "pp") -> None:
        self.size, self.rank = runtime.axis_size(axis), runtime.axis_rank(axis)
        self._groups: dict[tuple[Direction, bool], dist.ProcessGroup] = {}
        self._two_ways = self.size == 2 and virtual > 1
        if self.size == 1:
            return
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            for wraps in (False, True) if self._two_ways else (False,):
                self._groups[direction, wraps] = runtime.new_group(axis)
        self._ranks = dist.get_process_group_ranks(self._groups["forward", False])

    def send(self, channel: Channel, tensor: Tensor) -> dist.Work:
        """Begins to send; the tensor must stay as it is until the work is done."""
        work = dist.isend(tensor, self._ranks[channel.destination], group=self._group(channel))
        assert work is not None
        return work

    def receive(self, channel: Channel, tensor: Tensor) -> dist.Work:
        """Begins to receive the next message of the channel into `tensor`."""
        work = dist.irecv(tensor, self._ranks[channel.source], group=self._group(channel))
        assert work is not None
        return work

    def _group(self, channel: Channel) -> dist.ProcessGroup:
        return self._groups[channel.direction, self._two_ways and channel.source > channel.destination]


def sent_by(schedule: Schedule, action: Action) -> tuple[Channel, Message] | None:
    """What an action sends on, if the stage that needs it is on another rank."""
    if action.kind == "W":
        return None
    direction: Direction = "forward" if action.kind == "F" else "backward"
    target = action.stage + (1 if direction == "forward" else -1)
    if not 0 <= target < schedule.stages:
        return None
    source, destination = schedule.rank_of(action.stage), schedule.rank_of(target)
    if source == destination:
        return None
    return Channel(direction, source, destination), Message(direction, target, action.micro_batch)


def needed_by(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action waits for, if any stage makes it."""
    if action.kind == "W":
        return None
    direction: Direction = "forward" if action.kind == "F" else "backward"
    source = action.stage - (1 if direction == "forward" else -1)
    if not 0 <= source < schedule.stages:
        return None
    return Message(direction, action.stage, action.micro_batch)


class Mailbox:
    """What one rank sends and receives in one step.

    Receives of a channel are posted in the order in which the other rank sends, which follows from its part of the
    schedule; `prepare` posts what an action needs and all that comes before it.
    """

    def __init__(
        self,
        schedule: Schedule,
        channels: Channels,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._schedule, self._channels = schedule, channels
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._coming, self._channel_of = _incoming(schedule, channels.rank)
        self._next = dict.fromkeys(self._coming, 0)
        self._posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._local: dict[Message, Tensor] = {}
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def prepare(self, action: Action) -> None:
        """Posts the receive of what `action` needs."""
        message = needed_by(self._schedule, action)
        channel = None if message is None else self._channel_of.get(message)
        if message is None or channel is None:
            return
        queue = self._coming[channel]
        while message not in self._posted and self._next[channel] < len(queue):
            upcoming = queue[self._next[channel]]
            self._next[channel] += 1
            buffer = torch.empty(tuple(self._shapes[upcoming.micro_batch]), dtype=self._dtype, device=self._device)
            self._posted[upcoming] = self._channels.receive(channel, buffer), buffer
            if upcoming == message:
                return

    def take(self, action: Action) -> Tensor | None:
        """What `action` needs, once it is there; None at the ends of the pipeline."""
        message = needed_by(self._schedule, action)
        if message is None:
            return None
        if message in self._local:
            return self._local.pop(message)
        work, buffer = self._posted.pop(message)
        work.wait()
        return buffer

    def put(self, action: Action, tensor: Tensor) -> None:
        """Sends on what `action` made, or keeps it where the next stage is on this rank.

        Raises ValueError where it does not have the announced shape and type.
        """
        expected = tuple(self._shapes[action.micro_batch])
        if tuple(tensor.shape) != expected or tensor.dtype != self._dtype:
            raise ValueError(
                f"stage {action.stage} made {tuple(tensor.shape)} {tensor.dtype} of micro-batch {action.micro_batch}, "
                f"the other stages expect {expected} {self._dtype}; shape_of and dtype of the pipeline must say so"
            )
        sent = sent_by(self._schedule, action)
        if sent is None:
            step = 1 if action.kind == "F" else -1
            direction: Direction = "forward" if action.kind == "F" else "backward"
            self._local[Message(direction, action.stage + step, action.micro_batch)] = tensor
            return
        tensor = tensor.contiguous()
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        self._sending.append((self._channels.send(sent[0], tensor), tensor))

    def finish(self) -> None:
        """Returns once everything sent is out of this rank's hands."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


def _incoming(schedule: Schedule, rank: int) -> tuple[Mapping[Channel, list[Message]], Mapping[Message, Channel]]:
    """What comes to a rank over each channel, in order; and the channel of each message."""
    queues: dict[Channel, list[Message]] = {}
    channel_of: dict[Message, Channel] = {}
    for order in schedule.orders:
        for action in order:
            sent = sent_by(schedule, action)
            if sent is not None and sent[0].destination == rank:
                queues.setdefault(sent[0], []).append(sent[1])
                channel_of[sent[1]] = sent[0]
    return queues, channel_of
