"""Operator prototypes of GE, read from the declarations that the torch_npu wheel carries.

torchair's generated Python file holds one function per operator, whose docstring is the C++
declaration ``REG_OP(Name).INPUT(...)...``. That text is the only public statement of what GE
accepts that is at hand without CANN. Where it lags behind, :mod:`qwen_mtp.ge.overlay` corrects it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Arity = Literal["required", "optional", "dynamic"]

_REAL = "DOUBLE FLOAT FLOAT16 BF16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64"
_NUMBER = _REAL + " COMPLEX32 COMPLEX64 COMPLEX128 QINT8 QINT32 QUINT8"
_BASIC = _NUMBER + " QINT16 QUINT16"
# The groups of metadef's class TensorType; BasicType has no bool, ALL has.
GROUPS: dict[str, frozenset[str]] = {
    name: frozenset(f"DT_{dtype}" for dtype in members.split())
    for name, members in {
        "ALL": _BASIC + " BOOL RESOURCE STRING",
        "BASICTYPE": _BASIC,
        "NUMBERTYPE": _NUMBER,
        "REALNUMBERTYPE": _REAL,
        "FLOATINGDATATYPE": "DOUBLE FLOAT FLOAT16 BF16",
        "INTEGERDATATYPE": "INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64",
        "INDEXNUMBERTYPE": "INT32 INT64",
        "UNARYDATATYPE": "DOUBLE FLOAT FLOAT16 BF16 COMPLEX32 COMPLEX64 COMPLEX128",
    }.items()
}

_CALL = re.compile(
    r"\.(INPUT|OPTIONAL_INPUT|DYNAMIC_INPUT|OUTPUT|DYNAMIC_OUTPUT|ATTR|REQUIRED_ATTR|DATATYPE)"
    r"\((.*?)\)\s*(?=\.[A-Z]|\Z)",
    re.S,
)
_ARITY: dict[str, Arity] = {"OPTIONAL_INPUT": "optional"}


@dataclass(frozen=True, slots=True)
class Port:
    """One declared input or output.

    Attributes:
        name: Its name; a dynamic port names its tensors ``name0``, ``name1``, ...
        arity: Whether it must be fed, may be left out, or is a list.
        dtypes: Names of the dtypes it takes; empty where the declaration names none.
        symbol: The type variable (``T1``) it shares with other ports, "" for none.
    """

    name: str
    arity: Arity
    dtypes: frozenset[str]
    symbol: str = ""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One declared attribute.

    Attributes:
        name: Its name.
        type: GE's type: ``Int``, ``Float``, ``Bool``, ``String``, ``Type``, ``ListInt``, ...
        required: It has no default.
        default: The default as written in the declaration, "" if required.
    """

    name: str
    type: str
    required: bool
    default: str = ""


@dataclass(frozen=True, slots=True)
class Prototype:
    """The declaration of one operator type, ports in order."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...]


Prototypes = Callable[[str], Prototype | None]


def wheel_prototypes(torchair: Path) -> Prototypes:
    """A look-up by operator type; a declaration is parsed when it is first asked for.

    Args:
        torchair: The directory of the torchair package.
    """
    texts = _declarations(torchair)

    @cache
    def find(op_type: str) -> Prototype | None:
        return parse(op_type, texts[op_type]) if op_type in texts else None

    return find


def parse(name: str, text: str) -> Prototype:
    """Read the calls that follow ``REG_OP(name)``."""
    text = text.replace(".ATRR(", ".ATTR(")  # as the wheel misspells it once
    calls = _CALL.findall(text.split(".OP_END_FACTORY_REG")[0].strip())
    variables = {
        key: _dtypes(spec)
        for kind, rest in calls
        if kind == "DATATYPE"
        for key, spec in [_arguments(rest)]
    }
    return Prototype(
        name,
        tuple(_port(kind, rest, variables) for kind, rest in calls if kind.endswith("INPUT")),
        tuple(_port(kind, rest, variables) for kind, rest in calls if kind.endswith("OUTPUT")),
        tuple(_attribute(kind, rest) for kind, rest in calls if kind.endswith("ATTR")),
    )


@cache
def _declarations(torchair: Path) -> dict[str, str]:
    folder = torchair / "_ge_concrete_graph"
    text = (folder / "auto_generated_ge_raw_ops.py").read_text(encoding="utf-8")
    found = re.findall(r'REG_OP\((\w+)\)(.*?)"""', text, re.S)
    return {name: body.replace("\\n", "") for name, body in found}


def _arguments(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(",")
    return first.strip(), rest.strip()


def _port(kind: str, text: str, variables: dict[str, frozenset[str]]) -> Port:
    name, spec = _arguments(text)
    arity: Arity = "dynamic" if "DYNAMIC" in kind else _ARITY.get(kind, "required")
    symbol = spec.strip('"') if spec.startswith('"') else ""
    dtypes = variables.get(symbol, frozenset()) if symbol else _dtypes(spec)
    return Port(name, arity, dtypes, symbol)


def _dtypes(spec: str) -> frozenset[str]:
    """Every ``DT_X`` and every group named in a spec; some of them are misspelt in the wheel."""
    named = set(
        re.findall(r"DT_\w+", spec.replace("BFLOAT16", "BF16").replace("FLOAT32", "FLOAT"))
    )
    words = {word.upper() for word in re.findall(r"\b[A-Za-z]+\b", spec)}
    return frozenset(named).union(*(GROUPS[word] for word in words & GROUPS.keys()))


def _attribute(kind: str, text: str) -> Attribute:
    name, spec = _arguments(text)
    type_, default = _arguments(spec)
    return Attribute(name, type_[:1].upper() + type_[1:], kind == "REQUIRED_ATTR", default)
