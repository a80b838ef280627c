"""What a pickle may name, and the light data that each name stands for here.

Nothing that a pickle names is ever imported or called. A name on an allow list is a `Global` of our own, whose
constructor, where it has one, is a function of this module. The names are those that torch 1.13 to 2.13 and Python 3.8
to 3.14 write into DCP metadata and into tensors saved by `torch.save`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import Refused
from reshard.tensors.dtypes import BY_TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHECKPOINT = "torch.distributed.checkpoint"
# Axes of a tensor; torch has a limit of 64.
MAX_AXES = 64


class Instance:
    """An object: the kind of thing it is, and its pickled state. Compared by identity."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any = None) -> None:
        self.kind = kind
        self.state = state


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """An allowed name. kind: what it stands for; new: whether it has plain instances; reduce: our own constructor.

    dtype: for a torch dtype, safetensors' name of it, or "" where safetensors has none.
    hook: the reader of metadata looks ahead where this class begins an object.
    """

    kind: str
    new: bool = False
    reduce: Callable[[Any], Any] | None = None
    dtype: str | None = None
    hook: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """A value whose content is of no use here: a layout, a memory format, a device, a path."""

    kind: str


LAYOUT = Constant("layout")
MEMORY_FORMAT = Constant("memory format")
DEVICE = Constant("device")
PATH = Constant("path")


def _size(args: Any) -> tuple[int, ...]:
    """torch.Size as a plain tuple."""
    if not args:
        return ()
    (values,) = args
    if type(values) not in (tuple, list) or len(values) > MAX_AXES or any(type(v) is not int for v in values):
        raise ValueError("not a size")
    return tuple(values)


def _ordered_dict(args: Any) -> dict[Any, Any]:
    if args and list(args[0]):
        raise ValueError("a filled OrderedDict")
    return {}


def _getattr(args: Any) -> Constant:
    """Some releases of Python 3.11 pickle an enum member as getattr(class, name). Nothing else may use it."""
    owner, name = args
    if not isinstance(owner, Global) or owner.kind != "memory format" or not isinstance(name, str):
        raise Refused("pickle", "", "calls builtins.getattr for something other than a memory format")
    return MEMORY_FORMAT


def _constant(value: Constant) -> Callable[[Any], Any]:
    return lambda args: value


def _rebuilt(kind: str) -> Callable[[Any], Any]:
    return lambda args: Instance(kind, args)


def _parameter(args: Any) -> Any:
    """A parameter is the tensor that it wraps."""
    if not isinstance(args[0], Instance) or args[0].kind not in ("tensor v2", "tensor v3"):
        raise ValueError("a parameter of something else")
    return args[0]


# torch dtypes that no safetensors file can hold. They may occur in what is left out.
OTHER_DTYPES = (
    *("complex32", "complex128", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8)),
)

DTYPE_GLOBALS: dict[tuple[str, str], Global] = {
    **{("torch", name): Global("dtype", dtype=row.name) for name, row in BY_TORCH.items()},
    **{("torch", name): Global("dtype", dtype="") for name in OTHER_DTYPES},
}

SIZE = Global("size", reduce=_size)
ORDERED_DICT = Global("ordered dict", reduce=_ordered_dict)
MEMORY_FORMATS = Global("memory format", reduce=_constant(MEMORY_FORMAT))
PATHS = Global("path", reduce=_constant(PATH))
DEVICES = Global("device", reduce=_constant(DEVICE))
TENSOR_PROPERTIES = Global("properties", new=True)
TENSOR = Global("tensor", new=True, hook=True)
CHUNK = Global("chunk", new=True, hook=True)
INDEX = Global("index", new=True, hook=True)
STORAGE_INFO = Global("storage info", new=True)

COMMON_GLOBALS: dict[tuple[str, str], Global | Constant] = {
    **DTYPE_GLOBALS,
    ("torch", "Size"): SIZE,
    ("torch", "device"): DEVICES,
    ("collections", "OrderedDict"): ORDERED_DICT,
}

METADATA_GLOBALS: dict[tuple[str, str], Global | Constant] = {
    **COMMON_GLOBALS,
    (f"{CHECKPOINT}.metadata", "Metadata"): Global("metadata", new=True),
    (f"{CHECKPOINT}.metadata", "TensorStorageMetadata"): TENSOR,
    (f"{CHECKPOINT}.metadata", "BytesStorageMetadata"): Global("bytes", new=True),
    (f"{CHECKPOINT}.metadata", "ChunkStorageMetadata"): CHUNK,
    (f"{CHECKPOINT}.metadata", "TensorProperties"): TENSOR_PROPERTIES,
    (f"{CHECKPOINT}.metadata", "MetadataIndex"): INDEX,
    (f"{CHECKPOINT}.metadata", "StorageMeta"): Global("storage meta", new=True),
    (f"{CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): MEMORY_FORMATS,
    (f"{CHECKPOINT}.filesystem", "_StorageInfo"): STORAGE_INFO,
    (f"{CHECKPOINT}._fsspec_filesystem", "_StorageInfo"): STORAGE_INFO,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): TENSOR_PROPERTIES,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): MEMORY_FORMATS,
    ("torch.serialization", "_get_layout"): Global("layout", reduce=_constant(LAYOUT)),
    ("torch", "strided"): LAYOUT,
    ("builtins", "getattr"): Global("getattr", reduce=_getattr),
    ("__builtin__", "getattr"): Global("getattr", reduce=_getattr),
    **{
        (module, name): PATHS
        for module in ("pathlib", "pathlib._local")  # Python 3.13 alone writes the second
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    },
}

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}

ITEM_GLOBALS: dict[tuple[str, str], Global | Constant] = {
    **COMMON_GLOBALS,
    ("torch._utils", "_rebuild_tensor_v2"): Global("tensor v2", reduce=_rebuilt("tensor v2")),
    ("torch._utils", "_rebuild_tensor_v3"): Global("tensor v3", reduce=_rebuilt("tensor v3")),
    ("torch._utils", "_rebuild_parameter"): Global("parameter", reduce=_parameter),
    ("torch.storage", "UntypedStorage"): Global("storage", dtype=""),
    **{("torch", name): Global("storage", dtype=dtype) for name, dtype in STORAGE_DTYPES.items()},
}


MEGATRON = (
    "is a Megatron torch_dist checkpoint, which this version recognises but does not read",
    "convert it to Hugging Face with Megatron-Bridge or the trainer's own tool",
)


def printable(text: str) -> str:
    """Text from an untrusted file, made fit for one line of a message."""
    return text[:120].encode("ascii", "backslashreplace").decode("ascii").replace("\n", "\\n").replace("\r", "\\r")


def resolver(table: Mapping[tuple[str, str], Global | Constant], where: str) -> Callable[[str, str], Global | Constant]:
    """Maps the names in one file to `table`. Raises Refused for any other name."""

    def resolve(module: str, name: str) -> Global | Constant:
        found = table.get((module, name))
        if found is not None:
            return found
        if module.split(".")[0] in ("megatron", "glm"):
            raise Refused("layout", where, *MEGATRON)
        raise Refused(
            "pickle", where, f"names {printable(module)}.{printable(name)}, which no checkpoint of plain tensors needs",
            "nothing was run; do not open it with tools that load any pickle",
        )  # fmt: skip

    return resolve
