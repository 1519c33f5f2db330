"""From a torch graph to a GE model: trace, decompose, and hand over to torchair.

The traced program is the one that the ONNX back end lowers. Its operators are replaced by their
forms for Ascend (``decomposed`` or ``fused``), its weights become inputs, so that no weight is
ever in memory, and torchair's ``dynamo_export`` converts the rest operator by operator.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram

from qwen_mtp.custom_ops.operator import NAMESPACE, Operator
from qwen_mtp.custom_ops.torch_library import OPERATORS
from qwen_mtp.errors import ExportError
from qwen_mtp.export import converters
from qwen_mtp.export.air_passes import Interface, finish
from qwen_mtp.export.blueprint import Blueprint
from qwen_mtp.export.lowering import CHECKS
from qwen_mtp.export.torchair import Writer, bring_up, quiet
from qwen_mtp.ge.proto import load_air
from qwen_mtp.ge.soc import find_soc
from qwen_mtp.graphs.spec import AscendChoice, GraphSpec

_NAME = "graph"


@dataclass(frozen=True, slots=True)
class Converted:
    """One graph as torchair wrote it.

    Attributes:
        model: The ``ModelDef``; its inputs are those of the program that are used, in order.
        weights: Names of the stored tensors that the first inputs of the program are.
        used: For each input of the program, whether the graph reads it.
        writer: What stood behind torchair.
    """

    model: Any
    weights: tuple[str, ...]
    used: tuple[bool, ...]
    writer: Writer


def decompose(program: ExportedProgram, choice: AscendChoice) -> ExportedProgram:
    """Replace the operators of the product by calls of aten and ``torch.ops.npu``.

    Args:
        program: A traced graph.
        choice: Which forms to take: kernels where the lowering asks for them and the chip, or an
            operator package, has them.

    Returns:
        A program in which operators of the product only stand where their ``ge`` form converts
        them.
    """
    bring_up()  # defines torch.ops.npu
    table = {}
    for operator in OPERATORS:
        kernel = _has_kernels(operator, choice)
        form = operator.fused if kernel else operator.decomposed
        if form is not None:
            table[getattr(getattr(torch.ops, NAMESPACE), operator.name).default] = form
    with quiet():
        decomposed: ExportedProgram = program.run_decompositions(table)
    for node in list(decomposed.graph.nodes):
        if node.target in CHECKS:
            decomposed.graph.erase_node(node)
    decomposed.graph_module.recompile()
    return decomposed


def _has_kernels(operator: Operator, choice: AscendChoice) -> bool:
    """Whether an operator runs on its own kernels; those that are named are always used."""
    needed, named = set(operator.kernels), set(choice.custom_ops)
    if not needed or needed <= named:
        return bool(needed)
    return choice.lowering == "fused" and not (needed - named) & find_soc(choice.soc_version).lacks


def convert(program: ExportedProgram) -> Converted:
    """Convert a decomposed program.

    Raises:
        ExportError: torchair has no converter for an operator.
        MissingExtraError: torch_npu is missing or of another release.
    """
    torchair, writer = bring_up()
    converters.register(torchair)
    _check_converted(program)
    parameters = program.graph_signature.inputs_to_parameters
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    weights = [parameters[node.name] for node in inputs if node.name in parameters]
    with TemporaryDirectory() as folder:
        try:
            with quiet():
                torchair.dynamo_export(
                    *_stand_ins([node.meta["val"] for node in inputs]),
                    model=_Flat(program.graph_module),
                    export_path=folder,
                    export_name=_NAME,
                    dynamic=False,
                )
        except Exception as error:  # dynamo wraps whatever a converter raises
            raise ExportError(f"torchair cannot convert the graph: {_reason(error)}") from error
        model = load_air(Path(folder) / f"{_NAME}.air")
    names = tuple(name.removeprefix("model.") for name in weights)
    return Converted(model, names, tuple(bool(node.users) for node in inputs), writer)


def compose_air(
    blueprint: Blueprint, choice: AscendChoice, folder: str, progress: Callable[[str], None]
) -> Iterator[tuple[GraphSpec, Any, Writer]]:
    """Convert every graph.

    Args:
        blueprint: What to build.
        choice: What for.
        folder: Folder of the weight files, relative to the models.
        progress: Called with the name of each graph before it is traced.

    Yields:
        The signature, the finished ``ModelDef`` and what wrote it.

    Raises:
        ExportError: torchair has no converter for an operator.
        MissingExtraError: torch_npu is missing or of another release.
    """
    places = {tensor.name: tensor for tensor in blueprint.stored}
    for spec in blueprint.specs:
        progress(spec.name)
        converted = convert(decompose(blueprint.trace(spec), choice))
        weights = [places[name] for name in converted.weights]
        interface = Interface(spec, weights, converted.used, folder)
        yield spec, finish(converted.model, interface), converted.writer


def _check_converted(program: ExportedProgram) -> None:
    """Refuse operators of the product that have no form for this lowering."""
    converted = {o.name for o in OPERATORS if o.ge is not None}
    for node in program.graph.nodes:
        namespace, _, name = str(node.target).partition(".")
        if namespace == NAMESPACE and name.removesuffix(".default") not in converted:
            raise ExportError(f"{node.target}: this operator has no form for Ascend")


class _Flat(torch.nn.Module):
    """The graph as a module whose weights are inputs like all others."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__()
        self._module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for tensor in inputs:  # an input takes its place in the trace where it is first looked at
            tensor.dim()
        return tuple(self._module(*inputs))


def _stand_ins(fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor for each input over one piece of memory that nobody reads or writes.

    Each has a storage of its own: inputs that share one would be traced as views of each other.
    """
    size = max(fake.numel() * fake.element_size() for fake in fakes)
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return [_view(memory, fake) for fake in fakes]


def _view(memory: mmap.mmap, fake: torch.Tensor) -> torch.Tensor:
    count = prod(fake.shape)
    if count == 0:
        return torch.empty(fake.shape, dtype=fake.dtype)
    return torch.frombuffer(memory, dtype=fake.dtype, count=count).reshape(fake.shape)


def _reason(error: BaseException) -> str:
    """The line that matters: dynamo puts its own before it and a traceback after it."""
    lines = str(error).partition(" raised:\n")
    return (lines[2] or lines[0]).split("\n")[0]
