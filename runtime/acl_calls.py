"""Calls into ``acl``, the Python module of CANN, and what its return codes mean.

A function of ``acl`` answers ``ret``, ``(value, ret)`` or a value alone. A ``ret`` other than 0
raises with the name of the function, the code and what it was about.
"""

from importlib import import_module
from operator import attrgetter
from typing import Any

from qwen_mtp.errors import MissingExtraError, PackageError, RequestError

INITIALIZED_BEFORE = 100002
_NO_SUCH_DEVICE = 107001

_COMPILE = "compile it again with ascend/atc.sh for the chip that npu-smi info names"
_SMALLER = "free it, or export with a smaller --max-num-seqs or --max-model-len"
LOG = "CANN's log in ~/ascend/log/debug/plog says more"
_MEANINGS = {
    100000: ("a parameter is not valid", LOG),
    100001: ("acl.init has not been called", "make a new engine"),
    100003: ("the file cannot be read", _COMPILE),
    107000: ("a parameter is not valid", LOG),
    _NO_SUCH_DEVICE: ("there is no such device", "npu-smi info lists them"),
    107002: ("this thread has no context", "make a new engine"),
    145002: ("the file cannot be read", _COMPILE),
    145006: ("the file is cut off", _COMPILE),
    207000: ("the chip or driver lacks it", _COMPILE),
    207001: ("no memory is left", _SMALLER),
    207004: ("no device is usable", "npu-smi info lists them"),
    207006: ("not permitted", "the user must be able to open /dev/davinci*"),
    207018: ("no memory is left on the device", _SMALLER),
    507008: ("it is compiled for another chip", _COMPILE),
    507011: ("the model stopped", LOG),
    507014: ("a kernel ran too long", LOG),
    507015: ("a kernel failed", LOG),
    507018: ("a kernel of the control processor failed", LOG),
    545601: ("no memory is left", _SMALLER),
}


def import_acl() -> Any:
    """The module.

    Raises:
        MissingExtraError: CANN is not installed or its environment is not set.
    """
    try:
        return import_module("acl")
    except ImportError as error:
        raise MissingExtraError(
            f"the Python module acl cannot be imported ({error}): install CANN and source its "
            "set_env.sh"
        ) from error


def answer(acl: Any, name: str, *args: Any) -> Any:
    """Call ``name`` and give its answer as it is."""
    return attrgetter(name.removeprefix("acl."))(acl)(*args)


def call(acl: Any, name: str, *args: Any, of: str = "") -> Any:
    """Call a function that answers ``ret`` or ``(value, ret)`` and give the value.

    Raises:
        PackageError: ``ret`` is not 0; ``of`` says what the call was about.
        RequestError: There is no such device.
    """
    found = answer(acl, name, *args)
    value, ret = found if isinstance(found, tuple) else (None, found)
    if ret != 0:
        raise error(acl, name, ret, of)
    return value


def error(acl: Any, name: str, ret: int, of: str = "") -> PackageError | RequestError:
    """The error for a return code, with what AscendCL itself says of it."""
    meaning, remedy = _MEANINGS.get(ret, ("", LOG))
    recent = getattr(acl, "get_recent_err_msg", str)  # old versions have none
    said = " ".join(str(recent() or "").split())[:300]
    where = f" in {of}" if of else ""
    reason = "; ".join(filter(None, (meaning, said)))
    kind = RequestError if ret == _NO_SUCH_DEVICE else PackageError
    return kind(f"{name} failed with {ret}{where}{f' ({reason})' if reason else ''}; {remedy}")
