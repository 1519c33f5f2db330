"""Operators made of smaller ones: one node where a kernel does it all, else what they are made of.

A chain of small operators costs a CPU more in passes over memory and in nodes than in
arithmetic. Such a chain is one operator with a ``composed`` form, a torch function of the smaller
ones. Modules call it through :func:`composite`; while :func:`whole` is in force tracing keeps it
as one node, otherwise its parts are traced and no back end sees it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from qwen_mtp.custom_ops.operator import NAMESPACE, Operator

_whole: ContextVar[bool] = ContextVar("whole", default=False)


@contextmanager
def whole() -> Iterator[None]:
    """Keep composite operators as one node in what is traced meanwhile."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def composite(operator: Operator) -> Callable[..., Any]:
    """What a module calls for ``operator``: the torch operator, or the function of its parts."""
    import torch

    assert operator.composed is not None, operator.name
    if _whole.get():
        return getattr(getattr(torch.ops, NAMESPACE), operator.name)  # type: ignore[no-any-return]
    return operator.composed
