"""The graph of a model in TensorFlow's GraphDef format, for TensorBoard.

TensorBoard draws a node's name (by its scopes), inputs and device, and lists its attributes.
TensorBoard shows the attribute ``_output_shapes`` along the edges.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef

from quorate.replica.witness.forward_graph import Node

PRODUCER = 22  # the GraphDef version of torch's own writer


def graph_def(nodes: Sequence[Node]) -> bytes:
    """Return a graph, serialized for an event."""
    versions = VersionDef(producer=PRODUCER)
    return bytes(GraphDef(node=map(_node_def, nodes), versions=versions).SerializeToString())


def _node_def(node: Node) -> NodeDef:
    attributes = {}
    if node.shapes:
        shapes = [
            TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])
            for shape in node.shapes
        ]
        attributes["_output_shapes"] = AttrValue(list=AttrValue.ListValue(shape=shapes))
    if node.dtype:
        attributes["dtype"] = AttrValue(s=node.dtype.encode())
    return NodeDef(
        name=node.name,
        op=node.kind,
        input=node.inputs,
        device=_device(node.device),
        attr=attributes,
    )


def _device(name: str) -> str:
    """Return ``/device:CUDA:0`` for ``cuda:0``."""
    kind, _, number = name.partition(":")
    return f"/device:{kind.upper()}:{number or 0}" if kind else ""
