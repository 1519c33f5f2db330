"""Packages whose graphs run on the stand-in for AscendCL: a toy one, and the real modules."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from qwen_mtp.graphs.model import Graph
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import GraphSpec, Layout, StateSpec, TensorSpec, state_specs
from qwen_mtp.runtime.package import Package
from tests.acl_stand_in import Arrays, OmFile, StandIn, om_file
from tests.packages import package, random_checkpoint
from tests.rounds import EagerGraphs

SLOTS, WIDTH, HIDDEN = 2, 3, 8


def touch(directory: Path, package: Package) -> dict[str, Path]:
    """Empty ``.om`` files; what they hold is the stand-in's business."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {graph.name: directory / f"{graph.name}.om" for graph in package.manifest.graphs}
    for path in paths.values():
        path.touch()
    return paths


def _tensor(name: str, *shape: int, dtype: Any = "int32", state: str | None = None) -> TensorSpec:
    return TensorSpec(name, dtype, shape, state)


def _toy_graphs(dtype: Any) -> tuple[GraphSpec, ...]:
    """``key`` and ``ssm`` change in place, ``conv`` and ``stash`` have a new value."""
    wide, one = (SLOTS, 32), (1, 32)

    def state(name: str, *shape: int, out: bool = False) -> TensorSpec:
        kind = "float32" if name in ("stash",) else dtype
        return _tensor(name + ".out" * out, *shape, dtype=kind, state=name)

    def floats(name: str, *shape: int) -> TensorSpec:
        return _tensor(name, *shape, dtype="float32")

    prefill = GraphSpec(
        "prefill",
        "prefill",
        4,
        0,
        (
            _tensor("token_ids", 1, 4),
            _tensor("block_table", 1, WIDTH),
            state("key", 4, 32),
            state("conv", *one),
            state("ssm", *one, 2),
        ),
        (_tensor("tokens", 1, 1), floats("logits", 1, 1, 5), state("conv", *one, out=True)),
    )
    verify = GraphSpec(
        "target_verify_r2",
        "target_verify",
        2,
        1,
        (
            _tensor("token_ids", SLOTS, 2),
            _tensor("block_table", SLOTS, WIDTH),
            state("key", 4, 32),
            state("conv", *wide),
            state("ssm", *wide, 2),
            state("stash", *wide),
        ),
        (
            _tensor("tokens", SLOTS, 2),
            floats("hidden", SLOTS, 2, HIDDEN),
            floats("logits", SLOTS, 2, 5),
            state("conv", *wide, out=True),
            state("stash", *wide, out=True),
        ),
    )
    draft = GraphSpec(
        "mtp_draft_k1",
        "mtp_draft",
        2,
        1,
        (
            _tensor("tokens", SLOTS, 2),
            floats("hidden", SLOTS, 2, HIDDEN),
            _tensor("block_table", SLOTS, WIDTH),
        ),
        (_tensor("draft_ids", SLOTS, 1), floats("draft_logits.0", SLOTS, 5)),
    )
    return prefill, verify, draft


def toy_package(directory: Path, dtype: Any = "float32") -> Package:
    """Three graphs and four states small enough to be counted by hand."""
    manifest = package(random_checkpoint(num_hidden_layers=1, layer_types=("full_attention",)))
    kinds = (("key", "kv", (4, 32)), ("conv", "conv", (SLOTS, 32)))
    kinds += (("ssm", "ssm", (SLOTS, 32, 2)), ("stash", "stash", (SLOTS, 32)))  # type: ignore[assignment]
    states = tuple(
        StateSpec(
            name,
            kind,  # type: ignore[arg-type]
            shape,
            name != "key",
            "float32" if name == "stash" else dtype,
            name in ("key", "ssm"),
        )
        for name, kind, shape in kinds
    )
    geometry = replace(
        manifest.manifest.geometry, max_num_seqs=SLOTS, max_model_len=44, block_size=16
    )
    made = msgspec.structs.replace(
        manifest.manifest, graphs=_toy_graphs(dtype), states=states, geometry=geometry
    )
    toy = Package(directory, made)
    touch(directory / "ascend" / "om", toy)
    return toy


def _toy(given: Arrays, wanted: Arrays) -> None:
    """Counts: a prefill adds 10 to a state and a verify 1; outputs say what was read."""
    step = 10 if "stash" not in given else 1
    for name in ("key", "ssm"):
        if name in given:
            given[name] += step
    for name, value in wanted.items():
        value[...] = given[name.removesuffix(".out")] + step if name.endswith(".out") else 7
    if "tokens" in wanted:
        wanted["tokens"][:] = given["token_ids"].sum() + given["block_table"].sum()
    if "draft_ids" in wanted:
        wanted["draft_ids"][:] = given["tokens"][:, :1] + given["hidden"][:, 0, :1].astype("i4")


def toy_acl(package: Package, directory: Path | None = None) -> StandIn:
    """The toy package, compiled."""
    folder = directory or package.directory / "ascend" / "om"
    return StandIn(
        {str(folder / f"{g.name}.om"): om_file(g, _toy) for g in package.manifest.graphs}
    )


def in_place(package: Package, kinds: Collection[str]) -> Package:
    """The package as if the states of these kinds changed in place."""
    manifest = package.manifest
    states = tuple(replace(s, in_place=s.kind in kinds) for s in manifest.states)
    changed = {s.name for s in states if s.in_place}
    graphs = tuple(
        replace(g, outputs=tuple(t for t in g.outputs if t.state not in changed))
        for g in manifest.graphs
    )
    made = msgspec.structs.replace(manifest, graphs=graphs, states=states)
    return Package(package.directory, made)


def in_layout(package: Package, layout: Layout) -> Package:
    """The package as it would be written for a back end that keeps state in this way."""
    manifest = package.manifest
    config, geometry = manifest.config, replace(manifest.geometry, layout=layout)
    made = msgspec.structs.replace(
        manifest,
        geometry=geometry,
        graphs=graph_specs(config, geometry),
        states=state_specs(config, geometry),
    )
    return Package(package.directory, made)


@cache
def _modules(checkpoint: Path, geometry: Any) -> EagerGraphs:
    return EagerGraphs(checkpoint, geometry)


def module_acl(package: Package, checkpoint: Path, directory: Path) -> StandIn:
    """The torch modules of a package in the place of its compiled graphs."""
    eager = _modules(checkpoint, package.manifest.geometry)
    files = {}
    for name, path in touch(directory, package).items():
        files[str(path)] = _compiled(eager, package.graph(name))
    return StandIn(files)


def _compiled(eager: EagerGraphs, spec: GraphSpec) -> OmFile:
    module = Graph(eager.model, eager.specs[spec.name])
    names = [*(tensor.name for tensor in module.spec.outputs), *module.spec.in_place]

    def compute(given: Arrays, wanted: Arrays) -> None:
        tensors = [torch.from_numpy(given[t.name].copy()) for t in spec.inputs]
        with torch.inference_mode():
            found = module(*tensors)
        for name, value in zip(names, found, strict=True):
            target = wanted[name] if name in wanted else given[name.removesuffix(".out")]
            np.copyto(target, value.numpy(), casting="no")

    return om_file(spec, compute)
