"""Write the reference from docstrings, signatures and annotations: `make reference`, or `python docs/reference.py`.

It writes docs/reference.md, one page for each public module into docs/reference/, and the tables of ready-made slots
into docs/standard.md and docs/attention.md. docs/reference.toml has what the package does not say. A test fails if a
file is not up to date.
"""

import ast
import collections
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from signatures import (
    DOCS,
    HIDDEN,
    KNOWN,
    STARS,
    Row,
    alternatives,
    attributes,
    one_line,
    parameters,
    sections,
    signature,
    source_of,
    type_text,
)
from standard_slots import tables

import slotgraph.dataflow.errors
from slotgraph import DecodeRunner, Inputs
from slotgraph.config import RunnerConfig

COMMENT: Final = "<!-- `make reference` writes this page from docstrings: change those, or docs/reference.py. -->"
INTRO: Final = """
# Reference

The public names, one page a module. What is not listed here may change between releases.
In types, `V` is your declaration class, a subclass of [`Inputs`](reference/slotgraph.md#inputs), and `Out` is what
your step returns.
"""
MARK: Final = "<!-- generated: standard slots -->\n"
READY: Final = ("standard", "attention")
"""Modules of ready-made declarations, each with a page of its name."""


@attrs.frozen
class Entry:
    """A public name. given: Who gives it to users."""

    name: str
    value: Any
    given: str = ""


# ---- what there is


@functools.cache
def entries() -> dict[str, list[Entry]]:
    """Return the entries of each page."""
    found = {}
    for module in KNOWN["modules"]:
        public = importlib.import_module(module)
        names = getattr(public, "__all__", slotgraph.dataflow.errors.__all__)
        found[module.rpartition(".")[2]] = [Entry(name, getattr(public, name)) for name in names]
    for path, (page, given) in KNOWN["returned"].items():
        found[page].append(Entry(path.rpartition(".")[2], load(path), given=given))
    return found


def load(path: str) -> Any:
    """Return what a path within the package names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"slotgraph.{module}"), name)


def is_standard(value: Any) -> bool:
    """Return whether a name is a declaration, whose slots are on the page of its module."""
    return inspect.isclass(value) and issubclass(value, Inputs) and value is not Inputs


@functools.cache
def places() -> dict[str, str]:
    """Return the link to each name and each method, from a page of the reference."""
    found = dict(KNOWN["links"])
    for page, own in entries().items():
        seen = collections.Counter[str]()
        for entry in own:
            if is_standard(entry.value):
                found[entry.name] = found[f"{page}.{entry.name}"] = f"../{page}.md#{entry.name.lower()}"
                continue
            for name in (entry.name, *(f"{entry.name}.{method}" for method in own_methods(entry.value))):
                anchor = re.sub(r"\W", "", name.lower())
                number = f"-{seen[anchor]}" if seen[anchor] else ""  # as GitHub tells equal headings apart
                found.setdefault(name, f"{page}.md#{anchor}{number}")
                seen[anchor] += 1
    return found


def members(kind: Any) -> dict[str, Any]:
    """Return the public methods and properties of a class, those of its bases first."""
    found = dict[str, Any]()
    for base in reversed(kind.__mro__ if inspect.isclass(kind) else ()):
        for name, value in vars(base).items() if base.__module__.startswith("slotgraph") else ():
            is_member = inspect.isroutine(value) or isinstance(value, property | functools.cached_property)
            if f"{base.__name__}.{name}" in HIDDEN:
                found.pop(name, None)
            elif is_member and (name == "__call__" or not name.startswith("_")):
                found[name] = value
    return found


def own_methods(kind: Any) -> dict[str, Any]:
    """Return the methods that are described at a class. Those that `DecodeRunner` has, too, are described there."""
    shared = {} if kind is DecodeRunner else members(DecodeRunner)
    found = members(kind).items()
    return {name: value for name, value in found if inspect.isroutine(value) and shared.get(name) is not value}


def said_of(entry: Entry) -> str:
    """Return the docstring of a class or function, or the one below the definition of anything else."""
    if inspect.isclass(entry.value) or inspect.isroutine(entry.value):
        return str(sections(entry.value)[""])
    for path, module in sys.modules.copy().items():
        if path.startswith("slotgraph.") and vars(module).get(entry.name) is entry.value:
            body = ast.parse(inspect.getsource(module)).body
            for line, after in itertools.pairwise(body):
                if re.match(rf"{entry.name}\b.*=", ast.unparse(line)) and ast.unparse(after)[0] in "\"'":
                    return inspect.cleandoc(ast.literal_eval(ast.unparse(after)))
    raise LookupError(f"nothing is said of {entry.name}: write a docstring below its definition")


def file_of(value: Any) -> Path:
    """Return the file that defines a class or a function. Public ones name the public module as theirs."""
    if inspect.isroutine(value):
        return Path(inspect.getsourcefile(inspect.unwrap(value)) or "")
    for path, module in sys.modules.copy().items():
        is_ours = path.startswith("slotgraph.") and vars(module).get(value.__name__) is value
        if is_ours and re.search(rf"^class {value.__name__}\b", inspect.getsource(module), re.MULTILINE):
            return Path(module.__file__ or "")
    raise LookupError(f"no module of slotgraph defines {value.__name__}")


# ---- text


def code(text: str, name: str = "") -> str:
    """Return code, as a link if its name has an entry."""
    link = places().get(name or text)
    return f"[`{text}`]({link})" if link else f"`{text}`"


def type_cell(annotation: Any) -> str:
    """Return a type for a table. Each alternative leads to its entry, or to that of a name in it."""
    found = dict[str, None]()
    for one in alternatives(annotation):
        text = type_text(one)
        names = [KNOWN["explained"].get(name, name) for name in re.findall(r"\w+", re.sub(r'"\w*"', "", text))]
        known = sorted((name for name in names if name in places()), key=lambda name: "python.org" in places()[name])
        found[code(text, known[0] if known else " ")] = None
    *first, last = found
    return f"{', '.join(first)} or {last}" if first else last


def prose(text: str, scope: str = "", but: Collection[str] = ()) -> str:
    """Return a docstring's text with links. scope: The entry that says it. but: Names of its parameters."""
    owner = scope.partition(".")[0]

    def linked(found: re.Match[str]) -> str:
        name = found[1].removeprefix("slotgraph.").removeprefix("testing.")
        for one in (f"{owner}.{name}", name, f"DecodeRunner.{name}" if found[2] else name):
            if one in places() and one not in (scope, owner) and name not in but:
                return f"[{found[0]}]({places()[one]})"
        return found[0]

    text = re.sub(r"`([A-Za-z][\w.]+)(\(\))?`", linked, text)
    return re.sub(r"(?<=\n\n)(?:    .*\n?)+", lambda found: f"```py\n{textwrap.dedent(found[0]).strip()}\n```\n", text)


def table(heads: Collection[str], rows: Collection[Collection[str]]) -> Iterator[str]:
    """Yield a table, if it has rows."""
    for cells in (heads, ["---"] * len(heads), *rows) if rows else ():
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield from [""] * bool(rows)


def described(
    title: str, rows: Collection[Row], said: Mapping[str, str], scope: str, *, defaults: bool = True
) -> Iterator[str]:
    """Yield the table of parameters or attributes. A docstring says something of all of them, or of none."""
    if missing := [row.name for row in rows if said and row.name not in said]:
        raise LookupError(f"the docstring of {scope} says nothing of {', '.join(missing)}")
    cells, names, typed = list[list[str]](), [row.name for row in rows], any(row.annotation for row in rows)
    for row in rows:
        stars = STARS.get(row.kind, "")
        default = {None: "" if stars else "required", "...": "see meaning"}.get(row.default, f"`{row.default}`")
        meaning = [prose(said[row.name], scope, names)] if said else []
        kind = [type_cell(row.annotation)] * typed
        cells.append([f"`{stars}{row.name}`", *kind, *[default] * defaults, *meaning])
    yield from table([title, *["type"] * typed, *["default"] * defaults, *["meaning"] * bool(said)], cells)


def raised(doc: Mapping[str, Any], scope: str) -> Iterator[str]:
    """Yield the list of what is raised."""
    items = [f"- {code(name)}: {prose(said, scope)}" for name, said in doc.get("Raises", {}).items()]
    yield from ["Raises:", "", *items, ""] if items else ()


def function(call: str, value: Any, scope: str) -> Iterator[str]:
    """Yield the description of a function or method."""
    rows, doc = list(parameters(value)), sections(value)
    yield from (signature(call, rows), "", prose(doc[""], scope, [row.name for row in rows]), "")
    yield from described("parameter", rows, doc.get("Args", {}), scope)
    kind, said = inspect.signature(value).return_annotation, prose(doc["Returns"], scope).removesuffix(".")
    if inspect.isgeneratorfunction(inspect.unwrap(value)) and not inspect.isgeneratorfunction(value):
        yield from ("Returns a context manager.", "")
    elif said or kind not in (None, Any, inspect.Signature.empty):
        yield from (f"Returns {type_cell(kind)}{': ' if said else ''}{said}.", "")
    yield from raised(doc, scope)


def class_head(entry: Entry) -> Iterator[str]:
    """Yield how a class is made or derived from, what it is, and its parameters and attributes."""
    kind, name, doc = entry.value, entry.name, sections(entry.value)
    is_base = (
        inspect.isabstract(kind)
        or issubclass(kind, Exception)
        or kind is Inputs
        or getattr(kind, "_is_protocol", False)
    )
    is_made = not (is_base or entry.given or f"{name}.__init__" in HIDDEN)
    rows = list(parameters(kind)) if is_made else []
    if is_base:
        bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
        yield from (f"```py\nclass {name}{f'({bases})' if bases else ''}\n```", "")
    elif is_made:
        yield from (signature(name, rows), "")
    yield from (prose(doc[""], name, [row.name for row in rows]), "")
    said = doc.get("Args", {}) | doc.get("Attributes", {})
    if "options" in said:
        said = sections(RunnerConfig)["Attributes"] | sections(DecodeRunner)["Args"] | said
    yield from described("attribute" if attrs.has(kind) else "parameter", rows, said, name)
    others = [row for row in attributes(kind) if row.name not in [one.name for one in rows]]
    if others and (not is_made or "Attributes" in doc):
        yield from described("attribute", others, doc.get("Attributes", {}), name, defaults=False)
    yield from raised(doc, name)


def class_body(name: str, kind: type) -> Iterator[str]:
    """Yield the properties and methods of a class."""
    own, shared = own_methods(kind), {} if kind is DecodeRunner else members(DecodeRunner)
    same, properties = list[str](), list[list[str]]()
    for member, value in members(kind).items():
        if shared.get(member) is value:
            same.append(code(member, f"DecodeRunner.{member}"))
        elif member not in own:
            read, doc = value.fget if isinstance(value, property) else value.func, sections(value)
            said = [doc[""], *(f"Raises {error}: {text}" for error, text in doc.get("Raises", {}).items())]
            kind_of = type_cell(inspect.signature(read).return_annotation)
            properties.append([f"`{member}`", kind_of, prose(one_line(" ".join(said)), name)])
    if same:
        yield from (f"As in {code('DecodeRunner')}: {', '.join(same)}.", "")
    yield from table(["property", "type", "meaning"], properties)
    for method, value in own.items():
        call = name if isinstance(value, classmethod) else re.findall("[A-Z][a-z]+", name)[-1].lower()
        yield from (f"### `{name}.{method}`", "")
        call += "" if method == "__call__" else f".{method}"
        yield from function(call, getattr(kind, method), f"{name}.{method}")


def entry_text(entry: Entry) -> Iterator[str]:
    """Yield an entry with its heading."""
    name, value = entry.name, entry.value
    yield from (f"## `{name}`", "", *([prose(entry.given), ""] if entry.given else []))
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        shown = type_cell(value) if typing.get_origin(value) else f"`{source_of(value)}`"
        if type(value).__name__ == "Axis":
            shown = f'`Axis("{value}"{", fixed=True" * value.fixed})`'
        yield from (prose(said_of(entry), name), "", f"It is {shown}.", "")
        return
    yield from class_head(entry) if inspect.isclass(value) else function(name, value, name)
    source = file_of(value).resolve().relative_to(DOCS.parent)
    yield from (f"Source: [{source}](../../{source})", "")
    yield from class_body(name, value) if inspect.isclass(value) else ()


# ---- pages


def pages() -> dict[Path, str]:
    """Return the text of each file that is written."""
    found, index = dict[Path, str](), [COMMENT, INTRO]
    for module, more in KNOWN["modules"].items():
        page, said = module.rpartition(".")[2], inspect.getdoc(importlib.import_module(module)) or ""
        head = one_line(said.split("\n\n")[0])
        lines = [COMMENT, "", f"# {module}", "", prose(head), "", *[prose(more), ""] * bool(more)]
        cells = list[list[str]]()
        for entry in entries()[page]:
            first = one_line(said_of(entry).split("\n\n")[0]).split(". ")[0].removesuffix(".")
            cells.append([code(entry.name), prose(f"{first}. {entry.given}".strip(), entry.name)])
        declarations = [row for row, entry in zip(cells, entries()[page], strict=True) if is_standard(entry.value)]
        lines += table(["declaration", "what it is"], declarations)
        for entry in entries()[page]:
            lines += entry_text(entry) if not is_standard(entry.value) else ()
        found[DOCS / "reference" / f"{page}.md"] = "\n".join(lines).strip() + "\n"
        listed = "\n".join(table(["name", "what it is"], cells))
        listed = re.sub(r"\]\((?=\w+\.md)", "](reference/", listed).replace("](../", "](")
        index += [f"## [{module}](reference/{page}.md)", "", head, "", listed]
    found[DOCS / "reference.md"] = "\n".join(index).strip() + "\n"
    for name in READY:
        path = DOCS / f"{name}.md"
        before, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
        made = "\n".join(tables(importlib.import_module(f"slotgraph.{name}"))).strip()
        found[path] = f"{before}{mark}\n{made}\n"
    return found


def stale() -> dict[Path, str]:
    """Return the files that are not up to date, with the text that they should have, or an empty one for none."""
    found = dict.fromkeys((DOCS / "reference").glob("*.md"), "") | pages()
    there = {path: path.read_text(encoding="utf-8") for path in found if path.exists()}
    return {path: text for path, text in found.items() if not text or there.get(path) != text}


if __name__ == "__main__":
    (DOCS / "reference").mkdir(exist_ok=True)
    for file, new in stale().items():
        if new:
            file.write_text(new, encoding="utf-8")
        else:
            file.unlink()
        print(f"slotgraph: {'wrote' if new else 'removed'} {file.relative_to(DOCS.parent)}")
