"""Element types of GE graphs by name: sizes and the groups the rules speak of."""

from qwen_mtp.ge.proto import dtype_name

BITS = {
    "DT_FLOAT": 32,
    "DT_FLOAT16": 16,
    "DT_BF16": 16,
    "DT_DOUBLE": 64,
    "DT_BOOL": 8,
    "DT_INT4": 4,
    "DT_INT8": 8,
    "DT_UINT8": 8,
    "DT_INT16": 16,
    "DT_UINT16": 16,
    "DT_INT32": 32,
    "DT_UINT32": 32,
    "DT_INT64": 64,
    "DT_UINT64": 64,
}
FLOATS = frozenset({"DT_FLOAT", "DT_FLOAT16", "DT_BF16", "DT_DOUBLE"})
INDICES = frozenset({"DT_INT32", "DT_INT64"})
_NAMES: dict[int, str] = {}


def descriptor_dtype(code: int) -> str:
    """Name of a descriptor's dtype, ``DT_UNDEFINED`` for a code the messages do not have."""
    if code not in _NAMES:
        try:
            _NAMES[code] = dtype_name(code)
        except ValueError:
            _NAMES[code] = "DT_UNDEFINED"
    return _NAMES[code]


def nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a dense tensor; None for a type that is none of :data:`BITS`."""
    if dtype not in BITS:
        return None
    count = 1
    for dim in shape:
        count *= dim
    return -(-count * BITS[dtype] // 8)
