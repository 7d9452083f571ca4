"""Remote calls between the process that executes a test and the process that executes the program under test.

A test reads global names of the program, calls its functions there, and compares the results in its own process. A
program may call functions that the test passed to it, and use attributes of objects of the test's classes, but nothing
else of the test's process.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .wire import BASES, Channel, decode, dump, encode

TEST = "test_of_the_program"  # the name of the module that a test is executed as
MUTABLE = (list, dict, set, bytearray)
PREDICATES = {
    name for kind in (str, bytes, frozenset, float) for name in dir(kind) if name.startswith(("is", "starts", "ends"))
}
"""Names of the methods of Python's own data types that return a bool, such as `isdigit`.

A test cannot call these methods on an object whose class the program defines, because they could always return True.
"""


class Peer:
    """One end of the connection between the process of a test and the process of its program.

    Args:
        channel: the connection.
        names: in the program's process, the program's global names and their values; in the test's process, None.

    Attributes:
        asked: the number of requests that this end has sent.
    """

    def __init__(self, channel: Channel, names: dict[str, Any] | None = None) -> None:
        self.channel = channel
        self.names = names
        self.asked = 0  # requests of this end
        self._held: dict[int, object] = {}  # objects that the other end knows by a number
        self._exceptions: dict[int, type[BaseException]] = {}

    def ask(self, operation: str, *given: Any, **named: Any) -> Any:
        """Have the other process carry out an operation, and return the result. While this process waits for the
        result, it answers requests of the other process.

        If an argument is a list, dict, set or bytearray, this process changes it in the way in which the operation has
        changed its copy in the other process.

        Args:
            operation: "begin" (once, at the start of a test) or "names" to get a dict of the program's global names,
                given as arguments, with their values; "call" to call the first argument with the others; otherwise
                the name of a function in `builtins` or `operator`.
            given, named: the operation's arguments, by position and by name.

        Raises:
            Exception: the exception that the operation raised in the other process.
            EOFError: the other process has ended.
        """
        self.asked += 1
        token = os.urandom(8).hex()  # an answer that was written before it was asked for does not have it
        self.channel.send(dump(["ask", token, operation, self._encode(list(given)), self._encode(named)]))
        while True:
            kind, answered, *said = json.loads(self.channel.receive())
            if kind == "ask":
                self._answer(answered, *said)
                continue
            if answered != token:
                raise EOFError("an answer to nothing")
            if kind == "raise":
                raise self._error(*said)
            value, changed = said
            for place, new in changed:
                restore(given[place], self._decode(new))
            return self._decode(value)

    def serve(self, before: Callable[[str], None]) -> None:
        """Answer requests of the other process until it ends.

        Args:
            before: called with the name of each operation before it is carried out.

        Raises:
            EOFError: the other process has ended.
        """
        while True:
            _, token, operation, given, named = json.loads(self.channel.receive())
            before(operation)
            self._answer(token, operation, given, named)

    def _answer(self, token: str, operation: str, given: list[object], named: object) -> None:
        try:
            values, keywords = self._decode(given), self._decode(named)
            value = self._do(operation, values, keywords)
            after = [[i, self._encode(new)] for i, new in enumerate(values) if type(new) in MUTABLE]
            changed = [[i, new] for i, new in after if new != given[i]]
            frame = dump(["answer", token, self._encode(value), changed])
        except EOFError:
            raise
        except BaseException as error:
            frame = dump(["raise", token, self._encode(type(error)), self._encode(list(error.args))])
        self.channel.send(frame)

    def _do(self, operation: str, given: list[Any], named: dict[str, Any]) -> Any:
        if self.names is None:
            return self._do_for_program(operation, given, named)
        if operation == "begin":
            self._held.clear()  # the objects were known to another test
        if operation in ("begin", "names"):
            return {name: self.names[name] for name in given if name in self.names}
        if operation == "call":
            function, *rest = given
            return function(*rest, **named)
        function = getattr(builtins, operation, None) or getattr(operator, operation)
        return function(*given, **named)

    def _do_for_program(self, operation: str, given: list[Any], named: dict[str, Any]) -> Any:
        held, *rest = given
        if operation == "call" and any(held is own for own in self._held.values()):
            return held(*rest, **named)
        own = type(held).__module__ == TEST and rest and type(rest[0]) is str and rest[0][:1] != "_"
        if operation in ("getattr", "setattr") and own:
            return getattr(builtins, operation)(held, *rest)
        raise TypeError("a program can call the functions of a test, and use attributes of its objects")

    def _encode(self, value: Any) -> Any:
        return encode(value, self._number)

    def _decode(self, said: Any) -> Any:
        return decode(said, self._numbered)

    def _number(self, value: Any) -> dict[str, Any]:
        if type(value) is Remote:
            return {"yours": object.__getattribute__(value, "_number")}
        for number, made in self._exceptions.items():
            if made is value:
                return {"yours": number}
        if self.names is None and not callable(value) and type(value).__module__ != TEST:
            if not isinstance(value, Iterator):
                raise TypeError(f"a test cannot hand a {type(value).__name__} to a program")
            value = value.__next__
            return {"iterator": self._hold(value)}
        number = self._hold(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(base for base in value.__mro__ if vars(builtins).get(base.__name__) is base)
            return {"exception": [number, value.__name__, base.__name__]}
        return {"object": [number, self._content(value)]}

    def _hold(self, value: object) -> int:
        self._held[id(value)] = value  # which keeps it alive, so no other has its number
        return id(value)

    def _content(self, value: object) -> list[object]:
        """Return a list of one item: the content of an object whose class derives from one of Python's own data types
        (a plain type, such as list). The content is encoded as an object of the plain type.

        The list is empty if the class derives from no plain type, or if the content has a value that cannot be copied
        to the other process.
        """
        for base, content in BASES.items():
            if issubclass(type(value), base):
                try:
                    return [encode(content(value), refuse)]
                except TypeError:
                    break
        return []

    def _numbered(self, kind: str, number: Any) -> Any:
        if kind == "yours":
            return self._held[number]
        if kind == "iterator":
            return iter(Remote(self, number, []), object())
        if kind == "exception":
            number, name, base = number
            parent = vars(builtins).get(base)
            if not (isinstance(parent, type) and issubclass(parent, BaseException)):
                raise EOFError("no exception")
            return self._exceptions.setdefault(number, type(str(name), (parent,), {}))
        if kind == "object":
            return Remote(self, number[0], [self._decode(part) for part in number[1]])
        raise EOFError(f"no value: {kind}")

    def _error(self, kind: object, given: object) -> BaseException:
        made, arguments = self._decode(kind), self._decode(given)
        if not (isinstance(made, type) and issubclass(made, BaseException)):
            return EOFError("no exception")
        error: BaseException = made.__new__(made, *arguments)
        error.args = tuple(arguments)
        return error


def refuse(value: object) -> NoReturn:
    """Raise TypeError for a value that cannot be copied to the other process.

    This function is passed to `encode` as its argument `number` where values must be copied. `encode` calls it for each
    value that is not of one of Python's own data types.
    """
    raise TypeError(type(value).__name__)


def restore(old: Any, new: Any) -> None:
    """Change a mutable value in place, so that its content equals that of a copy which the other process has changed.

    An item that is mutable itself, and whose type is the same in the copy, is changed in place as well, not replaced.

    Args:
        old: the list, dict, set or bytearray to change.
        new: the changed copy.

    Raises:
        EOFError: the copy is of another type.
    """
    if type(old) is not type(new):
        raise EOFError("a changed value of another type")
    if type(old) is list:
        old[:] = [kept(old[i], item) if i < len(old) else item for i, item in enumerate(new)]
    elif type(old) is dict:
        merged = {key: kept(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(merged)
    elif type(old) is set:
        old.clear()
        old.update(new)
    else:
        old[:] = new


def kept(old: Any, new: Any) -> Any:
    """Return the item that a container is to hold after the other process has changed its copy of the container.

    If the items before and after the change are mutable and of the same type, this is `old`, changed in place, so that
    other references to `old` see the change. Otherwise it is `new`.

    Args:
        old: the item before the change.
        new: the item of the changed copy.
    """
    if type(old) is type(new) and type(old) in MUTABLE:
        restore(old, new)
        return old
    return new


class Remote:
    """A stand-in for an object of the other process. What is done to the stand-in (a call, an attribute access, an
    operator) is done to the object in its process.

    The other process runs a program that must not pass a test by overriding operators. A value is called plain if it is
    of one of Python's own data types. A stand-in equals a plain value only if the object's class derives from a plain
    type, and the object's content, converted to the plain type, equals the value. An operator on a stand-in and a plain
    value may be computed by the other process. If its result is an object, another stand-in is returned; if its result
    is a plain value, the operator counts as not implemented.

    Args:
        peer: the connection to the other process.
        number: the number by which the other process knows the object.
        content: a list of one item, the object's content converted to the plain type from which its class derives. The
            list is empty if the class derives from no plain type.
    """

    __slots__ = ("_content", "_heard", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, content: list[object]) -> None:
        for name, value in zip(self.__slots__, (content, False, number, peer), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the object in its process, and return the result."""
        return asked(self, "call", *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name in PREDICATES or name.startswith("__"):
            raise AttributeError(f"the program's object has no {name!r} that counts: it is no plain value")
        return asked(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        asked(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        asked(self, "delattr", name)

    def __eq__(self, other: object) -> bool:
        if type(other) is Remote and not (plain(self) and plain(other)):
            return bool(asked(self, "eq", other))
        mine, theirs = plain(self), plain(other) if type(other) is Remote else [other]
        return bool(mine) and bool(mine[0] == theirs[0])

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, item: object) -> bool:
        return any(item is found or item == found for found in self)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and bool(asked(value, "isinstance", self))

    def __iter__(self) -> Any:
        return asked(self, "iter")

    def __next__(self) -> Any:
        return asked(self, "next")


def asked(of: Remote, operation: str, *given: object, **named: object) -> Any:
    """Have the other process carry out an operation on one of its objects, and return the result.

    Args:
        of: the `Remote` that stands for the object.
        operation: "call", or the name of a function in `builtins` or `operator`, such as "len".
        given, named: the arguments after the object.

    Raises:
        TypeError: the operation would convert an object to a value of one of Python's own data types, although the
            object is marked (see `heard_plain`).
    """
    peer: Peer = object.__getattribute__(of, "_peer")
    heard = object.__getattribute__(of, "_heard")
    if heard and operation in CONVERSIONS:
        raise TypeError("the program's object has met a plain value, and is none itself")
    found = peer.ask(operation, of, *given, **named)
    return heard_plain(found) if heard and type(found) is Remote else found


def heard_plain(found: Remote) -> Remote:
    """Mark the result of an operator on a program's object and a plain value (one of Python's own data types), and
    return it.

    The program has seen the plain value, which may be the expected result, and could return whatever makes the test
    pass. So a marked object cannot be converted to a plain value.

    Args:
        found: the result, a `Remote`.
    """
    object.__setattr__(found, "_heard", True)
    return found


def plain(value: Remote) -> list[Any]:
    """Return a list of one item: the content of the object that a `Remote` stands for, converted to the data type of
    Python (such as list) from which the object's class derives. The list is empty if the class derives from none."""
    found: list[Any] = object.__getattribute__(value, "_content")
    return found


def converting(name: str) -> Callable[..., object]:
    """Return a special method for the class `Remote`, which stands for an object in another process. The method lets
    that process carry out an operation on the object, and returns the result.

    Args:
        name: name of the operation, such as "len" for the method `__len__`.
    """
    return lambda self, *given: asked(self, name, *given)


def operating(name: str, reflected: bool = False) -> Callable[..., object]:
    """Return a special method for the class `Remote`, which implements an operator with two operands.

    If the other operand is of one of Python's own data types, and the object's class derives from such a type, the
    operator is applied to the object's content, in this process. Otherwise the other process computes the result.

    Args:
        name: name of the operator's function in the module `operator`.
        reflected: whether this object is the right operand, as in `__radd__`.
    """

    def method(self: Remote, other: object) -> object:
        if type(other) is Remote:
            return asked(self, name, other)
        pair = [plain(self)[0] if plain(self) else self, other]
        if plain(self):
            return getattr(operator, name)(*(reversed(pair) if reflected else pair))
        peer: Peer = object.__getattribute__(self, "_peer")
        found = peer.ask(name, *(reversed(pair) if reflected else pair))
        return heard_plain(found) if type(found) is Remote else NotImplemented

    return method


CONVERSIONS = ("bool", "int", "float", "complex", "abs", "round", "index", "str", "repr", "format")
for _name in (*CONVERSIONS, "len", "hash", "reversed", "getitem", "setitem", "delitem", "neg", "pos", "invert"):
    setattr(Remote, f"__{_name}__", converting(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", operating(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    setattr(Remote, f"__{_name.strip('_')}__", operating(_name))
    setattr(Remote, f"__r{_name.strip('_')}__", operating(_name, reflected=True))
