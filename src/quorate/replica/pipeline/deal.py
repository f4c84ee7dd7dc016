"""Dealing: assigns the nodes of a trace to stages, with the values passed between stages.

A node belongs to the stage of the recording, so all nodes of a stage run before all of the next,
and the backward pass, in the reverse order of nodes, visits the stages in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn

from quorate.errors import CutError
from quorate.replica.pipeline import checks
from quorate.replica.pipeline.stage_graph import OUTPUT, StageGraph
from quorate.replica.pipeline.trace import FREE, ForwardTrace


def dealt(model: nn.Module, trace: ForwardTrace) -> tuple[StageGraph, ...]:
    """Return the stages of a trace.

    Raises:
        CutError: stages would share a tensor of which each has a copy.
    """
    assert trace.output is not None
    count = len(trace.reached) + 1
    _refuse_shared_writes(trace)
    nodes: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in trace.graph.nodes:
        if (stage := trace.stages[node]) != FREE:
            nodes[stage].append(node)
    order = {node: number for number, node in enumerate(trace.graph.nodes)}
    needed = [_needed(trace, own) for own in nodes]
    names_of = _names(model)
    used = [
        [*_tensors(model, trace, own, free)] for own, (_, free) in zip(nodes, needed, strict=True)
    ]
    for stage, each in trace.inside_functions:
        if isinstance(each, torch.Tensor):
            used[stage].append(each)
        else:
            used[stage] += [*each.parameters(), *each.buffers()]
    users: dict[str, list[int]] = {}
    for stage, tensors in enumerate(used):
        for tensor in tensors:
            if (name := names_of.get(id(tensor))) is None:
                continue
            stages = users.setdefault(name, [])
            if stage not in stages:
                stages.append(stage)
    # Parameters unused by forward may be used by a loss function, which the last stage completes.
    parameters = [name for name, _ in model.named_parameters()]
    owner = {name: users.get(name, [count - 1])[0] for name in names_of.values()}

    made = []
    for stage, own in enumerate(nodes):
        takes = needed[stage][0]
        takes.sort(key=order.__getitem__)
        later = {node for other in range(stage + 1, count) for node in needed[other][0]}
        gives = [node for node in own if node in later] if stage < count - 1 else [trace.output]
        inputs = {node: trace.inputs[node] for node in takes if node in trace.inputs}
        module = fx.GraphModule(model, _graph(trace, own, takes, gives), f"Stage{stage}")
        # Without modes: these are the user's, and a stage has only some of the modules.
        names = [inputs.get(node, node.name) for node in takes]
        written = {u.value for u in trace.uses if u.writes and trace.stages[u.node] == stage}
        made.append(
            StageGraph(
                index=stage,
                module=module,
                takes=tuple(names),
                gives=tuple(node.name for node in gives) if stage < count - 1 else (OUTPUT,),
                inputs=tuple(inputs.values()),
                parameters=tuple(name for name in parameters if owner[name] == stage),
                shared=tuple(
                    n for n in parameters if stage in users.get(n, ()) and len(users[n]) > 1
                ),
                buffers=tuple(name for name, _ in model.named_buffers() if owner[name] == stage),
                writes=tuple(n for n, node in zip(names, takes, strict=True) if node in written),
                modules=tuple(dict.fromkeys(_called(own))),
            )
        )
    return tuple(made)


def _called(nodes: Iterable[fx.Node]) -> list[str]:
    return [str(node.target) for node in nodes if node.op == "call_module"]


def _needed(trace: ForwardTrace, own: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the values taken by a stage, and the free nodes copied to it."""
    stage = trace.stages[own[0]] if own else 0
    takes: dict[fx.Node, None] = {}
    free: dict[fx.Node, None] = {}
    waiting = [*own]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if trace.stages[node] == FREE and node not in trace.inputs:
                if node not in free:
                    free[node] = None
                    waiting.append(node)
            elif trace.stages[node] != stage:
                takes[node] = None
    return [*takes], [*free]


def _graph(
    trace: ForwardTrace, own: list[fx.Node], takes: list[fx.Node], gives: list[fx.Node]
) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in takes:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
    check = checks.as_they_were(trace.followed, trace.reads_mode)
    graph.create_node("call_function", check)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a free node, read for the first time
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    is_off, was = False, None
    for node in own:
        for read in node.all_input_nodes:
            copied(read)
        if (node in trace.without_grad) != is_off:
            is_off = not is_off
            if is_off:
                was = graph.create_node("call_function", torch.is_grad_enabled)
            switch = (False,) if is_off else (was,)
            graph.create_node("call_function", torch.set_grad_enabled, switch)
        copied(node)
    if is_off:
        graph.create_node("call_function", torch.set_grad_enabled, (was,))
    graph.output(tuple(copies[node] for node in gives))
    return graph


def _names(model: nn.Module) -> dict[int, str]:
    """Return the names of parameters and buffers, by id; the first name of tied ones."""
    return {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}


def _tensors(
    model: nn.Module, trace: ForwardTrace, own: Iterable[fx.Node], free: Iterable[fx.Node]
) -> Iterable[torch.Tensor]:
    """Yield the parameters and buffers that a stage reads."""
    for node in own:
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            yield from module.parameters()
            yield from module.buffers()
    for node in free:
        if node.op == "get_attr":
            yield trace.values[node]


def _refuse_shared_writes(trace: ForwardTrace) -> None:
    """Refuse a tensor written by a stage and read by another: each stage has a copy."""
    for name, stages in trace.written_buffers.items():
        if len(stages) > 1:
            why = f"buffer {name} is written in stages {' and '.join(map(str, sorted(stages)))}"
            raise CutError(why, "cut where all calls of its module are on one side")
    for number, write in enumerate(trace.uses):
        if not write.writes:
            continue
        stage = trace.stages[write.node]
        for use in trace.uses[number + 1 :]:
            is_older = trace.stages[use.value] < stage and use.node is not write.node
            is_other = trace.stages[use.node] != stage or use.value is not write.value
            if use.storage == write.storage and is_older and is_other:
                reader = trace.stages[use.node]
                why = f"{trace.lines[write.node]}: stage {stage} writes what stage {reader} reads"
                raise CutError(why, "cut elsewhere, or have it written to another tensor")
