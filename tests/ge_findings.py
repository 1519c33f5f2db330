"""What the checks find in a graph, as the user reads it."""

from typing import Any

from qwen_mtp.ge.check import check_graph
from qwen_mtp.ge.soc import find_soc
from tests.ge_graphs import prototypes

B4 = "Ascend910B4"


def findings(model: Any, soc: str = B4, **given: Any) -> list[str]:
    return [str(f) for f in check_graph(model, prototypes(), find_soc(soc), **given)]
