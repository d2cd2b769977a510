"""What docstrings, signatures and annotations say, for docs/reference.py: sections, parameters, and types as text."""

import inspect
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

DOCS: Final = Path(__file__).resolve().parent
KNOWN: Final = tomllib.loads((DOCS / "reference.toml").read_text(encoding="utf-8"))
HIDDEN: Final = frozenset(" ".join(KNOWN["hidden"].values()).split())
WIDTH: Final = 84
STARS: Final = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@attrs.frozen
class Row:
    """A parameter or an attribute. default: As source code has it, or None. kind: As `inspect` has it, or None."""

    name: str
    annotation: Any
    default: str | None = None
    kind: Any = None


def sections(value: Any) -> dict[str, Any]:
    """Return a docstring: its text by "", that of `Returns`, and the items of every other section, by name."""
    text, *parts = re.split(r"^(Args|Attributes|Returns|Raises):\n", inspect.getdoc(value) or "", flags=re.MULTILINE)
    found: dict[str, Any] = {"": text.strip(), "Returns": ""}
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        items = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(body), re.MULTILINE)
        found[title] = one_line(body) if title == "Returns" else {name: one_line(said) for name, said in items}
    return found


def one_line(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def source_of(value: Any) -> str | None:
    """Return a default as source code has it, or None for no default."""
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, str):
        return json.dumps(value)
    if inspect.isfunction(value):
        return value.__name__
    text = "..." if value is ... else repr(dict(value) if isinstance(value, Mapping) else value).replace("'", '"')
    return re.sub(
        r"^(\w+)\((absent|name)=.*", lambda found: f"{found[1]}()" if found[2] == "absent" else found[0], text
    )


def parameters(value: Any) -> Iterator[Row]:
    """Yield the parameters of a function or a class."""
    fields = {field.name: field for field in attrs.fields(value)} if attrs.has(value) else {}
    for one in inspect.signature(value).parameters.values():
        if one.name != "self" and f"{getattr(value, '__name__', '')}.{one.name}" not in HIDDEN:
            field = fields.get(one.name)
            default = field.default.factory() if hasattr(getattr(field, "default", None), "factory") else one.default
            yield Row(one.name, field.type if field else one.annotation, source_of(default), one.kind)


def attributes(kind: type) -> Iterator[Row]:
    """Yield the public fields of a class, and the attributes that its docstring has."""
    found = dict(getattr(kind.__init__, "__annotations__", {}))
    for base in reversed(kind.__mro__):
        found |= inspect.get_annotations(base)
    said = sections(kind).get("Attributes", {})
    for name in {**dict.fromkeys(found), **dict.fromkeys(said)}:
        is_field = attrs.has(kind) and not name.startswith("_") and f"{kind.__name__}.{name}" not in HIDDEN
        if name in said if said else is_field:
            yield Row(name, found.get(name, ""))


def signature(call: str, rows: Collection[Row]) -> str:
    """Return a block with a call and its parameters, on several lines if it is long."""
    parts = list[str]()
    for row in rows:
        if row.kind is inspect.Parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(STARS.get(row.kind, "") + row.name + ("" if row.default is None else f"={row.default}"))
    text = f"{call}({', '.join(parts)})"
    if len(text) > WIDTH:
        body = textwrap.fill(", ".join(parts) + ",", WIDTH, break_long_words=False, break_on_hyphens=False)
        text = f"{call}(\n{textwrap.indent(body, '    ')}\n)"
    return f"```py\n{text}\n```"


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, and the values of a Literal."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, str):
        yield from annotation.replace("dist.", "torch.distributed.").split(" | ")
    elif origin in (typing.Union, types.UnionType):
        for one in arguments:
            yield from alternatives(one)
    elif origin is typing.Literal:
        yield from map(source_of, arguments)
    elif origin is typing.ClassVar:
        yield from alternatives(arguments[0])
    else:
        yield annotation


def type_text(kind: Any) -> str:
    """Return a type as source code has it."""
    origin, arguments, found = typing.get_origin(kind), typing.get_args(kind), list(alternatives(kind))
    if kind is ...:
        return "..."
    if isinstance(kind, list) or origin is typing.Concatenate:
        return f"[{', '.join(map(type_text, arguments or kind))}]"
    if origin is typing.Literal:
        return f"Literal[{', '.join(found)}]"
    if len(found) > 1:
        return " | ".join(map(type_text, found))
    if origin is not None:
        return f"{type_text(origin)}[{', '.join(map(type_text, arguments))}]"
    name = (
        kind
        if isinstance(kind, str)
        else getattr(kind, "__forward_arg__", None) or getattr(kind, "__name__", str(kind))
    )
    is_torch = str(getattr(kind, "__module__", "")).startswith("torch")
    return ("torch.nn." if name == "Module" else "torch.") * is_torch + name.replace("NoneType", "None")
