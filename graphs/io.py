"""Named access to the flat inputs and outputs of a traced graph."""

from collections.abc import Sequence

import torch

from qwen_mtp.graphs.spec import GraphSpec

Tensor = torch.Tensor


class GraphIO:
    """The inputs of one call by name, and a place for its outputs.

    torch.export wants flat tensors in a fixed order; the modules want names. The signature is
    the only list of either.
    """

    def __init__(self, spec: GraphSpec, inputs: Sequence[Tensor]) -> None:
        """Name ``inputs``, which must follow ``spec.inputs``."""
        names = [tensor.name for tensor in spec.inputs]
        self._spec = spec
        self._inputs = dict(zip(names, inputs, strict=True))
        self._outputs: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The input of that name."""
        return self._inputs[name]

    def __contains__(self, name: str) -> bool:
        """Whether the graph has an input of that name."""
        return name in self._inputs

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Give the output of that name."""
        self._outputs[name] = value

    def advance(self, state: str, value: Tensor) -> None:
        """Replace a state tensor: later reads in this graph and the next call see ``value``."""
        self._inputs[state] = value
        self._outputs[f"{state}.out"] = value

    def outputs(self) -> tuple[Tensor, ...]:
        """Every output in the order of the signature, then the states changed in place."""
        missing = {t.name for t in self._spec.outputs} - self._outputs.keys()
        assert not missing, (self._spec.name, missing)
        for tensor in self._spec.outputs:
            assert tuple(self._outputs[tensor.name].shape) == tensor.shape, tensor.name
        named = tuple(self._outputs[tensor.name] for tensor in self._spec.outputs)
        return named + tuple(self._outputs[f"{name}.out"] for name in self._spec.in_place)
