"""Inferred dtypes and shapes are those that run and those that torch traced."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest

from qwen_mtp.ge.inference import infer
from qwen_mtp.ge.view import nodes_of
from tests.ge_graphs import layer, needs_wheel, weights

pytestmark = needs_wheel


def test_inferred_dtypes_and_shapes_are_those_of_a_run(tmp_path: Path) -> None:
    """Every tensor of the graph becomes an output of it."""
    import torch

    from qwen_mtp.ge.interpreter import Interpreter, WeightFiles

    model = layer()
    values = infer(nodes_of(model)).values
    sources = {"Data", "RefData", "Const", "FileConstant"}
    inner = [op for op in model.graph[0].op if op.type not in {*sources, "NetOutput"}]
    edges = [f"{op.name}:{i}" for op in inner for i in range(len(op.output_desc))]
    end = model.graph[0].op[-1]
    del end.input[:], end.input_desc[:]
    for i, edge in enumerate(edges):
        end.input.append(edge)
        end.input_desc.add(name=f"input{i}")
    weights(tmp_path)
    inputs = {
        "ids": torch.tensor([3, 1, 4, 15], dtype=torch.int32),
        "start": torch.tensor([2], dtype=torch.int32),
        "pool": torch.zeros(6, 2, 3),
    }
    found = Interpreter(model, WeightFiles(tmp_path), edges).run(inputs)
    names = {torch.float32: "DT_FLOAT", torch.int32: "DT_INT32", torch.int64: "DT_INT64"}
    names[torch.bool] = "DT_BOOL"
    assert len(edges) > 25
    for edge in edges:
        ran = (names[found[edge].dtype], tuple(found[edge].shape))
        assert (values[edge].dtype, values[edge].shape) == ran, edge


@pytest.mark.filterwarnings("ignore")  # torch and torchair warn of their own code
def test_inferred_dtypes_and_sizes_are_those_torch_traced() -> None:
    """torchair notes what torch traced for a node on its last operator; views only reshape it."""
    import torch

    from qwen_mtp.export.air import convert

    class Module(torch.nn.Module):
        def forward(self, x: Any, ids: Any, mask: Any) -> Any:
            rows = x.index_select(0, ids.reshape(-1)).reshape(2, 3, 8)
            a, b = rows.split([3, 5], 2)
            y = torch.bmm(a, a.transpose(1, 2)).softmax(-1)
            low = torch.full((), -1.0)
            y = torch.where(mask.unsqueeze(0) > 0, y, low)
            z = torch.cat([y, b], 2).cumsum(2)
            top, at = z.topk(3, 2)
            tail = torch.stack([z[:, :, i] for i in range(3)], 1).mean(1, keepdim=True)
            near = z.gather(2, at).sum((1, 2)).sigmoid()
            half = (tail.half() * 2).exp().to(torch.bfloat16)
            step = (torch.arange(3, dtype=torch.int32) + ids.sum(1).int().sum()).clamp(0, 5)
            best = z.argmax(2).int().eq(step).any(1)
            return top.neg(), near, half, step, best, z.sort(2)[1], z.max(2)[0].abs()

    args = (torch.ones(9, 8), torch.ones(2, 3, dtype=torch.int32), torch.ones(3, 3))
    program = torch.export.export(Module(), args).run_decompositions()
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
    program.graph_module.recompile()
    model = convert(program).model
    found = infer(nodes_of(model))
    assert [f for f in found.findings if f.rule != "declared"] == []
    names = {
        "float32": "DT_FLOAT", "float16": "DT_FLOAT16", "bfloat16": "DT_BF16",
        "int32": "DT_INT32", "int64": "DT_INT64", "bool": "DT_BOOL",
    }  # fmt: skip
    compared = 0
    for op in model.graph[0].op:
        for i, desc in enumerate(op.output_desc):
            note = desc.attr["_meta"].s.decode() if "_meta" in desc.attr else ""
            match = re.match(r"Tensor\(dtype=torch\.(\w+), shape=torch\.Size\(\[(.*?)\]\)", note)
            if match:
                size = prod(int(d) for d in match[2].split(",") if d.strip())
                value = found.values[f"{op.name}:{i}"]
                assert (value.dtype, prod(value.shape)) == (names[match[1]], size), op.name
                compared += 1
    assert compared > 40
