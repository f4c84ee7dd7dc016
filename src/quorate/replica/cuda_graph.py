"""Shards as CUDA graphs: forward and backward recorded once per shape, and then replayed.

A replay queues all kernels of a shard at once, without Python between them. A replay reads the
batch from memory at a fixed place, parameters and buffers in place, and leaves the loss, the other
results of the loss function, and the gradients in the graph's own memory, until the next replay.
Random numbers come from the device's generator: a replay reads seed and offset anew, so it draws
the numbers that the same kernels would have drawn (torch's notes on CUDA semantics, "CUDA Graphs").

Python code is not replayed. So a shard is not recorded unless it is known to be the same each time,
and is computed without a graph; the reason is noted once.

This file uses ``torch.cuda``: ``torch.accelerator.Graph``, for all devices, came after torch 2.10.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any, NamedTuple, Protocol

import torch

from quorate.errors import UserError
from quorate.replica.compiled import reason, signature
from quorate.replica.nested import leaves, mapped, tensors
from quorate.replica.notes import Notes

MOST_GRAPHS = 8  # of a replica: graphs keep their results
WARM_UPS = 2


class Step(NamedTuple):
    """The results of a shard's forward and backward pass, on the device."""

    returned: Any  # by the loss function
    grads: dict[str, torch.Tensor]


Replay = Callable[[], None]


def has_graphs(device: torch.device) -> bool:
    """Return whether ``CudaRecord`` can record on a device."""
    return device.type == "cuda"


class CaptureError(UserError):
    """A recording that torch cannot end; afterwards the process cannot compute."""


class GraphRecord(Protocol):
    """The recording of graphs on a device."""

    device: torch.device

    def warm_up(self, step: Callable[[], Step]) -> tuple[Step, str | None]:
        """Run a step, and return the reason why it cannot be recorded, if visible."""

    def __call__(self, step: Callable[[], Step]) -> tuple[Step, Replay]:
        """Run a step for the record. A replay overwrites the results of this run.

        Raises:
            CaptureError: the recording failed, and this process can no longer compute.
            Exception: an error of the step; the recording has ended, and the step can run without
                it.
        """


class _ShardGraph(NamedTuple):
    batch: Any  # input memory
    step: Step  # output memory
    replay: Replay
    owner: object  # of the parameters; kept alive, because the id is the key


class ShardGraphs:
    """The graphs of a replica. Used by one thread at a time.

    Args:
        record: makes a graph.
        fixed_tensors: returns the tensors read or written in place by a graph: the model's.
        notes: messages for the user.
    """

    def __init__(
        self, record: GraphRecord, fixed_tensors: Callable[[], Sequence[torch.Tensor]], notes: Notes
    ) -> None:
        self._record = record
        self._fixed_tensors = fixed_tensors
        self._notes = notes
        self._graphs: dict[object, _ShardGraph | None] = {}

    def run(
        self,
        batch: Any,
        owner: object,
        begin: Callable[[], None],
        step: Callable[[Any], Step],
    ) -> Step | None:
        """Compute a shard by a graph; None if the shard has to be computed without.

        Args:
            batch: the batch, on the device.
            owner: owner of the model's present parameters.
            begin: sets buffers and seeds generators.
            step: forward and backward from a batch, without waiting for the device.

        Returns:
            The output memory of the graph's step, valid until the next run.
        """
        key = (signature(batch), id(owner))
        if key not in self._graphs:
            self._graphs[key] = self._recorded(batch, owner, begin, step)
        graph = self._graphs[key]
        if graph is None:
            return None
        _refilled(graph.batch, batch)
        begin()
        graph.replay()
        return graph.step

    def forget(self) -> None:
        """Drop all graphs: the model has changed."""
        self._graphs.clear()

    def _recorded(
        self,
        batch: Any,
        owner: object,
        begin: Callable[[], None],
        step: Callable[[Any], Step],
    ) -> _ShardGraph | None:
        device = self._record.device
        why = unfit(batch, device)
        if sum(graph is not None for graph in self._graphs.values()) >= MOST_GRAPHS:
            why = f"shards have more than {MOST_GRAPHS} shapes; the first {MOST_GRAPHS} have graphs"
        if why is None:
            held = mapped(batch, torch.clone)
            try:
                numbers = []
                for _ in range(WARM_UPS):  # the first makes kernels: only the last counts
                    begin()
                    addresses = [tensor.data_ptr() for tensor in self._fixed_tensors()]
                    made, why = self._record.warm_up(lambda: step(_refilled(held, batch)))
                    numbers.append(plain(made.returned))
                    why = why or unfit_result(made.returned, device)
                    if [tensor.data_ptr() for tensor in self._fixed_tensors()] != addresses:
                        why = "the model replaces its buffers with new tensors"
                if numbers[0] != numbers[-1]:
                    why = "the loss function returns Python numbers that change"
                if why is None:
                    begin()
                    made, replay = self._record(lambda: step(mapped(held, _itself)))
                    return _ShardGraph(held, made, replay, owner)
            except CaptureError:
                raise
            except Exception as error:  # user code: without a graph, it works or raises again
                why = f"recording failed: {reason(error)}"
        self._notes.add(f"shards are computed without a CUDA graph: {why}")
        return None


def _refilled(held: Any, batch: Any) -> Any:
    """Return the input of a graph, filled with a batch, in new containers.

    User code may have written its tensors in place, or removed some from a container.
    """
    for mine, theirs in zip(tensors(held), tensors(batch), strict=True):
        mine.copy_(theirs)
    return mapped(held, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def unfit(batch: Any, device: torch.device) -> str | None:
    """Return why a graph cannot read a batch, or None. All leaves of a batch must be tensors."""
    for leaf in leaves(batch):
        if not isinstance(leaf, torch.Tensor):
            return f"the batch contains a {type(leaf).__name__}, expected only tensors"
        if leaf.device != device:
            return f"a tensor of the batch is on {leaf.device}"
    return None


def unfit_result(returned: Any, device: torch.device) -> str | None:
    """Return why a graph cannot return the result of a loss function, or None."""
    values = returned.values() if isinstance(returned, Mapping) else [returned]
    for value in values:
        if isinstance(value, Mapping):
            return "the loss function returns terms or metrics with weights of their own"
        if isinstance(value, torch.Tensor) and value.device != device:
            return f"the loss function returns a tensor on {value.device}"
    return None


def plain(returned: Any) -> dict[str, Number]:
    """Return the Python numbers in the result of a loss function."""
    values = returned if isinstance(returned, Mapping) else {}
    return {str(name): value for name, value in values.items() if isinstance(value, Number)}


def forward_backward(returned: Any, take_grads: Callable[[], dict[str, torch.Tensor]]) -> Step:
    """Finish a step after the call of the loss function, without waiting for the device.

    Args:
        returned: the result of the loss function: see ``quorate.loss``.
        take_grads: returns the gradients of the mean by name.
    """
    loss = returned["loss"] if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Mapping):  # terms: see ``unfit_result``
        torch.autograd.backward(loss.reshape(()))
    return Step(detached(returned), take_grads())


def detached(returned: Any) -> Any:
    """Detach a result from autograd's graph, which would tie later shards to the graph's stream."""
    if isinstance(returned, torch.Tensor):
        return returned.detach()
    made = copy.copy(returned) if isinstance(returned, MutableMapping) else dict(returned)
    for name, value in returned.items():
        if isinstance(value, torch.Tensor):
            made[name] = value.detach()
    return made


class CudaRecord:
    """The recording of graphs on a CUDA device, in one pool of memory.

    The graphs can share memory, because the results of a graph are read before another graph is
    replayed, on the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def warm_up(self, step: Callable[[], Step]) -> tuple[Step, str | None]:
        """Run a step while torch reports operations that wait for the device.

        Such an operation makes a recording fail, and leaves torch's memory allocator unusable.
        """
        before = torch.cuda.get_sync_debug_mode()
        with torch.cuda.device(self.device), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                made = step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if any("synchronizing CUDA operation" in str(each.message) for each in caught):
            return made, "the shard waits for the GPU, to read a number or to index with a mask"
        return made, None

    def __call__(self, step: Callable[[], Step]) -> tuple[Step, Replay]:
        """Record a step: see ``GraphRecord``."""
        with torch.cuda.device(self.device):
            if self._side is None:
                self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            try:
                # Waiting for the device is an error in this thread only: threads that load rows may
                # pin memory meanwhile.
                capture = torch.cuda.graph(
                    graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
                )
                made = captured(capture, step)
            except BaseException:
                torch.cuda.set_stream(current)  # a failure leaves the side stream current
                self._side = None  # and a partial recording in stream and pool
                graph.reset()
                raise
            current.wait_stream(self._side)
        return made, graph.replay


def captured(capture: AbstractContextManager[object], step: Callable[[], Step]) -> Step:
    """Run a step within a recording, and end the recording after any error of the step.

    Raises:
        CaptureError: the recording is void and cannot be ended. torch's memory allocator and
            generators remain in recording mode: draws raise, and freed memory is kept.
        Exception: an error of the step, after the recording has ended.
    """
    failed: BaseException | None = None
    try:
        with capture:
            try:
                made = step()
            except BaseException as error:  # raised again, once the recording has ended
                failed = error
    except RuntimeError as error:
        raise CaptureError(
            "compile=True",
            f"a shard waits for the GPU while it is recorded as a CUDA graph, after which torch "
            f"cannot go on: {reason(failed or error)}",
            fix="pass compile=False, or change what waits in the model or the loss function",
        ) from (failed or error)
    if failed is not None:
        raise failed
    return made
