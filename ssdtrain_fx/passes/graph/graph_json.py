"""A scheduled joint graph as JSON, to attach to a bug report or to run passes on later, on any machine.

The JSON has every node with its op, its arguments and the layout of its value. It also says which values share a
storage, which are saved for backward, and which results are gradients. It contains no tensor data, but it does contain
node names and lines of the model's source. It omits what only a compiler needs (descriptors, modules). So a graph that
was read back prints the same and gets the same aliases, candidates, costs and plan, but cannot be compiled.

    text = to_json(joint)
    joint = from_json(text)             # values are FakeTensors: nothing is computed, no GPU is needed

Symbolic sizes (trace with dynamic=False), and values and ops that this format cannot represent, raise an error that
names the node.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private import FakeTensor, FakeTensorMode, OpOverload
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, backward_starts

KIND = "ssdtrain_fx scheduled joint graph"
VERSION = 1

KEPT_META = ("stack_trace", "saved_tensor_with_no_vc_check", "autograd_backward", _torch_private.REALIZE_TO_STRIDES)
"""Plain entries of ``node.meta`` that a pass or the printed graph reads."""
OPERATORS = ("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg")
"""The functions of Python's ``operator`` module that occur in graphs."""
_NAMED = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
"""Types whose values are attributes of ``torch``."""


def to_json(joint: ScheduledJointGraph) -> str:
    """The graph as JSON text. The same graph gives the same text.

    Raises:
        ConfigError: the graph has symbolic sizes, or a value or op that cannot be written.
    """
    storages = _StorageNumbers()
    nodes: list[dict[str, Any]] = []
    for node in joint.graph.nodes:
        with _naming(node.name):
            if node.op == "output":
                continue
            written: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target_name(node)}
            if node.args:
                written["args"] = [_write(argument) for argument in node.args]
            if node.kwargs:
                written["kwargs"] = {name: _write(argument) for name, argument in node.kwargs.items()}
            if "val" in node.meta:
                written["value"] = _write_value(node.meta["val"], storages)
            meta = {name: node.meta[name] for name in KEPT_META if node.meta.get(name) is not None}
            if meta:
                written["meta"] = meta
            nodes.append(written)
    written_nodes = set(joint.graph.nodes)
    return json.dumps(
        {
            "kind": KIND,
            "version": VERSION,
            "torch": str(torch.__version__),
            "storage_bytes": storages.sizes_bytes,
            "nodes": nodes,
            "outputs": [_write(value) for value in joint.forward_outputs],
            "gradients": [_write(value) for value in joint.gradients],
            # A pass may have erased a saved view after replaying it elsewhere.
            "saved": [node.name for node in joint.saved if node in written_nodes],
            "backward_inputs": [node.name for node in joint.backward_inputs],
        },
        indent=1,
        allow_nan=False,
    )


def from_json(text: str) -> ScheduledJointGraph:
    """The graph that :func:`to_json` wrote.

    Raises:
        ConfigError: the text is not a saved graph, has another version, or calls an op that this process does not have.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"The saved graph is not valid JSON: {error}. Is the file truncated?") from error
    if not isinstance(raw, dict) or cast(dict[str, Any], raw).get("kind") != KIND:
        raise ConfigError(f"This JSON is not a saved graph: expected an object with kind {KIND!r}.")
    content = cast(dict[str, Any], raw)
    if content.get("version") != VERSION:
        raise ConfigError(
            f"The saved graph has version {content.get('version')}, expected {VERSION}. "
            "Save it again with this version of ssdtrain_fx."
        )
    try:
        return _Reader(content["storage_bytes"]).read(content)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"The saved graph is damaged: {type(error).__name__}: {error}") from error


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def _naming(node_name: str) -> Generator[None]:
    """Turn a _CannotWriteError into a ConfigError that names the node."""
    try:
        yield
    except _CannotWriteError as error:
        raise ConfigError(f"The graph cannot be saved: node {node_name!r} {error}.") from None


class _CannotWriteError(Exception):
    """Its message completes a sentence that begins with the node's name."""


class _StorageNumbers:
    """Numbers storages in the order in which they are first seen."""

    def __init__(self) -> None:
        self.sizes_bytes: list[int] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        key = _torch_private.storage_key(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self.sizes_bytes)
            self.sizes_bytes.append(_plain(tensor.untyped_storage().nbytes()))
        return self._numbers[key]


def _plain(size: int | torch.SymInt) -> int:
    if not isinstance(size, int):
        raise _CannotWriteError(f"has the symbolic size {size}; trace the model with dynamic=False")
    return size


def _target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):  # placeholder, get_attr
        return target
    if target is backward_starts:
        return "backward_starts"
    if isinstance(target, OpOverload):
        return f"{target.namespace}::{target._schema.name.partition('::')[2]}.{target._overloadname}"
    for name in OPERATORS:
        if getattr(operator, name) is target:
            return f"operator.{name}"
    raise _CannotWriteError(f"calls {target}, which is neither a torch op nor a function of Python's operator module")


def _write(value: object) -> Any:
    """An argument as JSON. A value that JSON cannot represent becomes an object with one key."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": repr(value)}
        case fx.Node():
            return {"node": value.name}
        case slice():
            parts = cast(tuple[object, ...], (value.start, value.stop, value.step))
            return {"slice": [_write(part) for part in parts]}
        case tuple():
            return {"tuple": [_write(part) for part in cast(tuple[object, ...], value)]}
        case list():
            return [_write(part) for part in cast(list[object], value)]
        case dict():
            items = cast(dict[object, object], value).items()
            return {"dict": [[_write(key), _write(part)] for key, part in items]}
        case torch.device():
            return {"device": str(value)}
        case _:
            for name, kind in _NAMED.items():
                if isinstance(value, kind):
                    return {name: str(value).removeprefix("torch.")}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _CannotWriteError(f"has the symbolic argument {value}; trace the model with dynamic=False")
    raise _CannotWriteError(f"has an argument of type {type(value).__name__}, which this format cannot represent")


def _write_value(value: object, storages: _StorageNumbers) -> Any:
    """The value of a node as JSON: only the layout, no data."""
    if isinstance(value, torch.Tensor):
        return {"tensor": _write_tensor(value, storages)}
    if isinstance(value, tuple):
        return {"tuple": [_write_value(part, storages) for part in cast(tuple[object, ...], value)]}
    if isinstance(value, list):
        return [_write_value(part, storages) for part in cast(list[object], value)]
    return _write(value)


def _write_tensor(value: torch.Tensor, storages: _StorageNumbers) -> dict[str, Any]:
    if type(value) is not FakeTensor:
        raise _CannotWriteError(f"is a tensor subclass {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        raise _CannotWriteError("is sparse, quantized, or a lazy conjugate or negation")
    return {
        "shape": [_plain(size) for size in value.shape],
        "stride": [_plain(stride) for stride in value.stride()],
        "offset": _plain(value.storage_offset()),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "storage": storages.number(value),
    }


# -- reading -----------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads one graph. Holds the nodes and storages read so far."""

    def __init__(self, storage_bytes: list[int]) -> None:
        self._fake_mode = FakeTensorMode()
        self._storage_bytes = storage_bytes
        self._storages: dict[int, torch.Tensor] = {}
        self._nodes: dict[str, fx.Node] = {}

    def read(self, content: Mapping[str, Any]) -> ScheduledJointGraph:
        graph = fx.Graph()
        attributes: dict[str, Any] = {}
        for written in content["nodes"]:
            node = self._read_node(graph, written)
            if node.op == "get_attr":
                attributes[str(node.target)] = node.meta["val"]
        outputs, gradients = (tuple(map(self._read, content[name])) for name in ("outputs", "gradients"))
        output = graph.output((outputs, gradients))
        output.meta["desc"] = ([None] * len(outputs), [None] * len(gradients))
        if not graph.find_nodes(op="call_function", target=backward_starts):
            raise ValueError("it has no backward_starts node")
        saved, backward_inputs = (
            tuple(self._nodes[name] for name in content[key]) for key in ("saved", "backward_inputs")
        )
        gm = fx.GraphModule(attributes, graph, class_name="ScheduledJointGraph")
        return ScheduledJointGraph(gm=gm, saved=saved, backward_inputs=backward_inputs)

    def _read_node(self, graph: fx.Graph, written: Mapping[str, Any]) -> fx.Node:
        name, op = written["name"], written["op"]
        if op not in ("placeholder", "get_attr", "call_function"):
            raise ValueError(f"node {name!r} has the unsupported op {op!r}")
        keywords: dict[str, Any] = written.get("kwargs", {})
        # FX generates Python code from a graph. Names that it inserts verbatim must be identifiers, or they would run.
        for part in (*keywords, *(() if op == "call_function" else written["target"].split("."))):
            if not part.isidentifier():
                raise ValueError(f"{part!r} in node {name!r} is not an identifier")
        node = graph.create_node(
            op,
            _find_target(written["target"]) if op == "call_function" else written["target"],
            tuple(map(self._read, written.get("args", ()))),
            {keyword: self._read(argument) for keyword, argument in keywords.items()},
            name=name,
        )
        if node.name != name:
            raise ValueError(f"the node name {name!r} is used twice or is not an identifier")
        if "value" in written:
            node.meta["val"] = self._read(written["value"])
        node.meta.update({name: value for name, value in written.get("meta", {}).items() if name in KEPT_META})
        self._nodes[name] = node
        return node

    def _read(self, written: Any) -> Any:
        if isinstance(written, list):
            return [self._read(part) for part in cast(list[Any], written)]
        if not isinstance(written, dict):
            return written
        ((kind, content),) = cast(dict[str, Any], written).items()
        match kind:
            case "node":
                return self._nodes[content]
            case "tensor":
                return self._read_tensor(content)
            case "tuple":
                return tuple(map(self._read, content))
            case "dict":
                return {self._read(key): self._read(part) for key, part in content}
            case "slice":
                return slice(*map(self._read, content))
            case "device":
                return torch.device(content)
            case "float":
                return float(content)
            case "complex":
                return complex(content)
            case _:
                return _attribute_of_torch(content, _NAMED[kind])

    def _read_tensor(self, content: Mapping[str, Any]) -> torch.Tensor:
        """A tensor on the same storage as other tensors with its storage number, which all have the same device."""
        number: int = content["storage"]
        dtype: torch.dtype = _attribute_of_torch(content["dtype"], torch.dtype)
        if number not in self._storages:
            self._storages[number] = torch.empty(self._storage_bytes[number], dtype=torch.uint8, device="meta")
        storage = self._storages[number]
        whole = storage.numel() // dtype.itemsize * dtype.itemsize
        value = storage[:whole].view(dtype).as_strided(content["shape"], content["stride"], content["offset"])
        # Views are made before the device is set: torch without CUDA cannot make views of a fake CUDA tensor.
        return _torch_private.fake_on(torch.device(content["device"]), value, self._fake_mode)


def _attribute_of_torch(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise ValueError(f"torch has no {kind.__name__} {name!r}")
    return value


def _find_target(name: str) -> Callable[..., Any]:
    """The function called ``name``. Only torch ops and known operators: reading a graph must not run arbitrary code."""
    if name == "backward_starts":
        return backward_starts
    module, _, attribute = name.rpartition(".")
    if module == "operator" and attribute in OPERATORS:
        return getattr(operator, attribute)
    namespace, _, op = module.partition("::")
    try:
        target: object = getattr(getattr(getattr(torch.ops, namespace), op), attribute)
    except AttributeError as error:
        raise ConfigError(
            f"The saved graph calls {name}, which this process does not have. "
            "Import the library that registers it, or use a torch version closer to the one that saved the graph."
        ) from error
    if not isinstance(target, OpOverload):
        raise ValueError(f"{name!r} is not an op")
    return cast(Callable[..., Any], target)
