"""The text form that policies and codecs share: ``name`` or ``name:parameter=value,...``.

A value may be such a thing itself, written ``name(parameter=value,...)``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from kvwinnow.errors import KvwinnowError

T = TypeVar("T")

SHARED = "budget"
"""A nested thing has no value of its own for this parameter where the outer one has it: it is given that one's."""

_NESTED = re.compile(r"\s*([^\s()=,:]+)\s*\((.*)\)\s*", re.DOTALL)


def parse_spec(
    text: str,
    registry: Mapping[str, type[T]],
    *,
    kind: str,
    error: type[KvwinnowError],
    shared: Mapping[str, Any] | None = None,
) -> T:
    """Build one of ``registry``'s dataclasses from its text form.

    Args:
        text: such as ``snapkv:budget=1024,window=32`` or ``compose:prompt=snapkv(window=32),decode=h2o``.
        registry: classes by name; the fields of each are its parameters.
        kind: what the classes are, for the complaint ("policy").
        error: what to raise.
        shared: values for parameters that the text does not give, such as those of a nested thing.

    Raises:
        KvwinnowError: of type ``error``: an unknown name or parameter, a missing or doubled value, a bracket that is
            never closed.
    """
    if not isinstance(text, str):
        raise error(f"{text!r} is a {type(text).__name__}, not the name of a {kind}; known are {', '.join(registry)}")
    name, colon, rest = (part.strip() for part in text.partition(":"))
    made = registry.get(name.lower())
    if made is None:
        raise error(f"{kind} {name!r} is unknown; known are {', '.join(registry)}")
    if colon and not rest:
        raise error(f"{kind} {text!r} ends after its colon; write {name}:parameter=value, or {name} alone")
    fields = {field.name: field for field in dataclasses.fields(made)}  # type: ignore[arg-type]
    known = list(fields)
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in _pieces(rest, text, kind, error))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            named = f"as in {name}:{known[0]}={key}" if known and "=" not in part else "check its name"
            raise error(f"{kind} {name} has no parameter {key!r}; {takes}, {named}")
        if not value:
            raise error(f"{kind} {name}: {part!r} has no value; write {key}=VALUE")
        if key in values:
            raise error(f"{kind} {name}: {key} is given twice, as {values[key]} and as {value}; give it once")
        values[key] = value
    given = {key: _value(value) for key, value in values.items() if not _is_nested(value, fields[key], registry)}
    values = {**{key: value for key, value in (shared or {}).items() if key in known}, **values, **given}
    common = {SHARED: values.get(SHARED, fields[SHARED].default)} if SHARED in known else dict(shared or {})
    if common and SHARED not in known:  # then it is for what is nested, named in the text or not
        defaults = {key: field.default for key, field in fields.items() if key not in values}
        nested_ones = {key: value for key, value in defaults.items() if isinstance(value, tuple(registry.values()))}
        values |= {key: show_value(value, but=SHARED) for key, value in nested_ones.items()}
    for key in values.keys() - given.keys() - (shared or {}).keys():
        match = _NESTED.fullmatch(values[key])
        nested = values[key] if match is None else ":".join(filter(None, (match[1], match[2].strip())))
        values[key] = parse_spec(nested, registry, kind=kind, error=error, shared=common)
    return made(**values)


def show_spec(name: str, instance: Any) -> str:
    """The text form of a policy or codec, parameters that are None left out."""
    text = ",".join(_shown(instance))
    return f"{name}:{text}" if text else name


def show_value(value: Any, *, but: str | None = None) -> str:
    """The text form of a parameter's value; of one that is a policy or codec itself, in brackets.

    ``but`` names the parameter that such a one is given, and does not show.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value).lower() if isinstance(value, bool) else str(value)
    inner, name = ",".join(_shown(value, but=but)), str(getattr(value, "name", value))
    return f"{name}({inner})" if inner else name


def given_to_nested(thing: Any) -> str | None:
    """The parameter that things nested in this one, a class or an instance, are given by it."""
    return SHARED if SHARED in {field.name for field in dataclasses.fields(thing)} else None


def _shown(instance: Any, *, but: str | None = None) -> Iterator[str]:
    given = given_to_nested(instance)
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if value is not None and field.name != but:
            yield f"{field.name}={show_value(value, but=given)}"


def _pieces(text: str, whole: str, kind: str, error: type[KvwinnowError]) -> Iterator[str]:
    """Split at the commas that are in no brackets."""
    depth = begin = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and not depth:
            yield text[begin:place]
            begin = place + 1
    if depth:
        raise error(f"{kind} {whole!r} has a bracket without its other half; write NAME(PARAMETER=VALUE,...)")
    yield text[begin:]


def _is_nested(value: str, field: dataclasses.Field[Any], registry: Mapping[str, type[Any]]) -> bool:
    """Whether a parameter's value is to be read as one of the registry's own things."""
    return bool(_NESTED.fullmatch(value)) or isinstance(field.default, tuple(registry.values()))


def _value(text: str) -> int | float | bool | str | None:
    constants = {"none": None, "true": True, "false": False}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
