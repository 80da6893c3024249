"""The whole state of a scheduler as bytes, and a scheduler from such bytes that goes on exactly as the first would.

Called by the journal and by replay. It walks whatever objects the core is made of, so a new part of the core is covered
without a word here; what it cannot carry (an open file, a lambda) it refuses by name. Reading runs no code but the
constructors of plain values, and makes only classes of the core and of ``shared.wire``.

Every mutable object is a row of a table and is referred to by its number, so sharing and cycles survive; values that
cannot change are written in place.
"""

import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import msgspec

from services.scheduler.core.machine import Scheduler
from shared.wire import tokens

FORMAT = 2
PACKAGES = ("services.scheduler.core", "shared.wire")
"""Only their classes and functions are ever written or read."""

_SCALARS = frozenset([type(None), bool, int, float, str, bytes])
_UNSET = [0]
_REFERENCE, _TUPLE, _NAMED, _FROZENSET, _ENUM, _GLOBAL, _STRUCT = range(1, 8)


class _Row:
    """Kinds of rows."""

    OBJECT, LIST, COLUMN, DICT, DEQUE, SET, ARRAY = range(7)


class SnapshotError(ValueError):
    """The state holds what cannot be written, or the bytes are no snapshot of this version of the core."""


def dump(scheduler: Scheduler) -> bytes:
    """Write a scheduler between two events. Raises SnapshotError."""
    return _Writer().write(scheduler)


def load(data: bytes) -> Scheduler:
    """Read what ``dump`` has written. Raises SnapshotError."""
    try:
        version, classes, rows, root = msgspec.msgpack.decode(data)
        if version != FORMAT:
            raise SnapshotError(f"a snapshot of format {version}; this version reads {FORMAT}")
        scheduler = _Reader(classes, rows).read(root)
    except SnapshotError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise SnapshotError(f"no snapshot of this version of the core: {error}") from error
    if not isinstance(scheduler, Scheduler):
        raise SnapshotError("a snapshot of something else than a scheduler")
    return scheduler


def _slots(cls: type) -> list[str]:
    """Names of all slots of a class, its bases' first."""
    names: list[str] = []
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _known(module: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in PACKAGES)


class _Writer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        """Row of each mutable object, by its identity; ``_objects`` keeps every one alive meanwhile."""
        self._objects: list[Any] = []
        self._classes: dict[type, int] = {}
        self._class_rows: list[list[Any]] = []
        self._slots: dict[type, list[str]] = {}

    def write(self, root: Any) -> bytes:
        reference = self._value(root)
        rows: list[Any] = []
        while len(rows) < len(self._objects):  # a row may add more objects; no recursion, however deep the graph
            rows.append(self._row(self._objects[len(rows)]))
        return msgspec.msgpack.encode([FORMAT, self._class_rows, rows, reference])

    def _class(self, cls: type) -> int:
        number = self._classes.get(cls)
        if number is None:
            if not _known(cls.__module__) or "<locals>" in cls.__qualname__:
                raise SnapshotError(f"a {cls.__module__}.{cls.__qualname__} is no part of the core")
            number = self._classes[cls] = len(self._class_rows)
            self._slots[cls] = _slots(cls)
            self._class_rows.append([cls.__module__, cls.__qualname__, self._slots[cls]])
        return number

    def _value(self, value: Any) -> Any:
        cls = type(value)
        if cls in _SCALARS:
            return value
        if cls is tuple:
            return [_TUPLE, self._values(value)]
        number = self._numbers.get(id(value))
        if number is not None:
            return [_REFERENCE, number]
        if isinstance(value, tuple):
            return [_NAMED, self._class(cls), self._values(value)]
        if isinstance(value, Enum):
            return [_ENUM, self._class(cls), value.name]
        if isinstance(value, msgspec.Struct) and cls.__struct_config__.frozen:
            return [_STRUCT, self._class(cls), msgspec.msgpack.encode(value)]
        if cls is frozenset:
            return [_FROZENSET, self._sorted(value)]
        if isinstance(value, type) or callable(value):
            return self._global(value)
        self._numbers[id(value)] = len(self._objects)
        self._objects.append(value)
        return [_REFERENCE, len(self._objects) - 1]

    def _values(self, values: Sequence[Any]) -> Sequence[Any]:
        """Each of several, which stay as they are if all are scalars, a tuple too: it is written as a list is.

        Most are, and calls are what this costs.
        """
        if _SCALARS.issuperset(map(type, values)):
            return values
        return [value if type(value) in _SCALARS else self._value(value) for value in values]

    def _global(self, value: Any) -> list[Any]:
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "<nameless>")
        if not _known(module) or getattr(sys.modules[module], name, None) is not value:
            raise SnapshotError(f"{module}.{name} cannot be written")
        return [_GLOBAL, module, name]

    def _sorted(self, items: Iterable[Any]) -> list[Any]:
        """Members of a set in an order that depends on nothing but their values."""
        return sorted((self._value(item) for item in items), key=msgspec.msgpack.encode)

    def _row(self, value: Any) -> list[Any]:
        cls = type(value)
        if cls is list:
            if value and type(value[0]) is int:
                try:
                    return [_Row.COLUMN, tokens.pack(value)]
                except (TypeError, OverflowError):
                    pass
            return [_Row.LIST, self._values(value)]
        if cls is dict:
            return [_Row.DICT, *self._pairs(value)]
        if cls is deque:
            return [_Row.DEQUE, value.maxlen, self._values(list(value))]
        if cls is set:
            return [_Row.SET, self._sorted(value)]
        if cls is array:
            return [_Row.ARRAY, value.typecode, value.tobytes()]
        number = self._class(cls)
        fields = [
            field if type(field := getattr(value, name, _UNSET)) in _SCALARS or field is _UNSET else self._value(field)
            for name in self._slots[cls]
        ]
        return [_Row.OBJECT, number, fields, *self._pairs(getattr(value, "__dict__", {}))]

    def _pairs(self, table: dict[Any, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Keys, and values in the same order."""
        return self._values(list(table)), self._values(list(table.values()))


class _Reader:
    def __init__(self, classes: list[list[Any]], rows: list[list[Any]]) -> None:
        self._classes = [self._find_class(*row) for row in classes]
        self._slots = [slots for _, _, slots in classes]
        self._rows = rows
        self._objects = [self._shell(row) for row in rows]
        self._values: dict[int, Callable[[list[Any]], Any]] = {
            _REFERENCE: lambda value: self._objects[value[1]],
            _TUPLE: lambda value: tuple(self._items(value[1])),
            _NAMED: lambda value: self._classes[value[1]](*self._items(value[2])),
            _FROZENSET: lambda value: frozenset(self._items(value[1])),
            _ENUM: lambda value: getattr(self._classes[value[1]], value[2]),
            _GLOBAL: lambda value: _find(value[1], value[2]),
            _STRUCT: lambda value: msgspec.msgpack.decode(value[2], type=self._classes[value[1]]),
        }

    def read(self, root: Any) -> Any:
        for row, value in zip(self._rows, self._objects, strict=True):
            self._fill(row, value)
        return self._value(root)

    def _find_class(self, module: str, name: str, slots: list[str]) -> Any:
        cls = _find(module, name)
        if not isinstance(cls, type) or _slots(cls) != slots:
            raise SnapshotError(f"{name} is not what it was when the snapshot was made")
        return cls

    def _items(self, values: list[Any]) -> list[Any]:
        return [self._value(value) for value in values]

    def _pairs(self, keys: list[Any], values: list[Any]) -> Iterable[tuple[Any, Any]]:
        return zip(self._items(keys), self._items(values), strict=True)

    def _value(self, value: Any) -> Any:
        return self._values[value[0]](value) if type(value) is list else value

    def _shell(self, row: list[Any]) -> Any:
        """An empty object of the row's kind; what refers to it can be made before it is filled."""
        match row[0]:
            case _Row.OBJECT:
                return object.__new__(self._classes[row[1]])
            case _Row.LIST:
                return []
            case _Row.COLUMN:
                return tokens.unpack(row[1])
            case _Row.DICT:
                return {}
            case _Row.DEQUE:
                return deque(maxlen=row[1])
            case _Row.SET:
                return set()
            case _Row.ARRAY:
                return array(row[1], row[2])
            case kind:
                raise SnapshotError(f"an object of kind {kind}")

    def _fill(self, row: list[Any], value: Any) -> None:
        match row[0]:
            case _Row.OBJECT:
                for name, field in zip(self._slots[row[1]], row[2], strict=True):
                    if field != _UNSET:
                        setattr(value, name, self._value(field))
                for name, field in self._pairs(row[3], row[4]):
                    setattr(value, name, field)
            case _Row.LIST:
                value.extend(self._items(row[1]))
            case _Row.DICT:
                value.update(self._pairs(row[1], row[2]))
            case _Row.DEQUE:
                value.extend(self._items(row[2]))
            case _Row.SET:
                value.update(self._items(row[1]))


def _find(module: str, name: str) -> Any:
    """A class or function of the core, by name."""
    if not _known(module) or module not in sys.modules:
        raise SnapshotError(f"{module}.{name} is no part of the core")
    return getattr(sys.modules[module], name)
