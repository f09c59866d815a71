"""The text form that policies and codecs share: ``name`` or ``name:parameter=value,...``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from kvwinnow.errors import KvwinnowError

T = TypeVar("T")


def parse_spec(text: str, registry: Mapping[str, type[T]], *, kind: str, error: type[KvwinnowError]) -> T:
    """Build one of ``registry``'s dataclasses from its text form.

    Args:
        text: such as ``snapkv:budget=1024,window=32``.
        registry: classes by name; the fields of each are its parameters.
        kind: what the classes are, for the complaint ("policy").
        error: what to raise.

    Raises:
        KvwinnowError: of type ``error``: an unknown name or parameter, a missing or doubled value.
    """
    if not isinstance(text, str):
        raise error(f"{text!r} is a {type(text).__name__}, not the name of a {kind}; known are {', '.join(registry)}")
    name, colon, rest = (part.strip() for part in text.partition(":"))
    made = registry.get(name.lower())
    if made is None:
        raise error(f"{kind} {name!r} is unknown; known are {', '.join(registry)}")
    if colon and not rest:
        raise error(f"{kind} {text!r} ends after its colon; write {name}:parameter=value, or {name} alone")
    known = [field.name for field in dataclasses.fields(made)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            named = f"as in {name}:{known[0]}={key}" if known and "=" not in part else "check its name"
            raise error(f"{kind} {name} has no parameter {key!r}; {takes}, {named}")
        if not value:
            raise error(f"{kind} {name}: {part!r} has no value; write {key}=VALUE")
        if key in values:
            raise error(f"{kind} {name}: {key} is given twice, as {values[key]} and as {value}; give it once")
        values[key] = _value(value)
    return made(**values)


def show_spec(name: str, instance: Any) -> str:
    """The text form of a policy or codec, parameters that are None left out."""
    shown = ((field.name, getattr(instance, field.name)) for field in dataclasses.fields(instance))
    text = ",".join(f"{key}={value}" for key, value in shown if value is not None)
    return f"{name}:{text}" if text else name


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
