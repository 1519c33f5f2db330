"""What the documents name exists, and what the package holds is in the documents."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

import qwen_mtp
from qwen_mtp.config import ModelConfig
from qwen_mtp.graphs.manifest import PackageManifest, Verification
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import Geometry, state_specs
from tests.checkpoints import tiny_config

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_inside_the_project_leads_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [t for t in targets if not (path.parent / t).exists()] == []


def test_the_readme_imports_what_the_package_offers() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", read("README.md"), re.DOTALL)
    imported = [
        alias.name
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module == "qwen_mtp"
        for alias in node.names
    ]
    assert imported
    assert [name for name in imported if not hasattr(qwen_mtp, name)] == []


def test_the_format_document_names_every_field_of_the_manifest() -> None:
    text = read("docs", "package-format.md")
    names = {*PackageManifest.__struct_fields__, *Verification.__struct_fields__}
    names |= {*(field.name for field in fields(Geometry))}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_format_document_names_every_tensor_and_every_kind_of_state(tmp_path: Path) -> None:
    text = read("docs", "package-format.md")
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    config = ModelConfig.from_checkpoint(tmp_path)
    geometry = Geometry(
        max_num_seqs=1,
        max_model_len=64,
        block_size=16,
        prefill_chunk=8,
        lookaheads=(3,),
        format="int8",
    )
    tensors = [t for g in graph_specs(config, geometry) for t in (*g.inputs, *g.outputs)]
    names = {re.sub(r"\.\d+$", ".j", t.name) for t in tensors if t.state is None}
    names |= {state.kind for state in state_specs(config, geometry)}
    assert {name for name in names if f"`{name}`" not in text} == set()
