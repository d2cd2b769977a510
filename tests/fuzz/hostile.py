"""What hostile texts and files are made of: values of every kind that JSON has, and some that it should not have."""

from typing import Any, Final

from hypothesis import strategies as st

DEEP: Final = 100_000
NASTY_TEXTS: Final = (
    "",
    "null",
    "true",
    "3",
    '"text"',
    "[]",
    "{}",
    "[" * DEEP,
    '{"a":' * DEEP,
    "[" * 900 + "]" * 900,
    '{"a": NaN}',
    '{"a": Infinity, "b": -Infinity}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a": 1e999}',
    '{"a": "\\ud800"}',
    '{"\\u0000": "\\u001b[31m"}',
    '{"a": 1, "a": 2}',
    "\ufeff{}",
    "{'a': 1}",
    '{"__class__": "os.system", "__reduce__": ["os.system", ["false"]]}',
)
"""JSON, or nearly, that has broken readers of it before."""

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 1 << 63, -(1 << 63), 1 << 200, 10**2000])
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["nan", "inf", "int64", "_dynamo", "os.system", "__class__", "../../etc", "a\x00b", "\ud800"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested plain data, by the keys that lead there."""
    found = [at]
    if isinstance(data, dict):
        found += [place for key in data for place in places(data[key], (*at, key))]
    elif isinstance(data, list):
        found += [place for key, one in enumerate(data) for place in places(one, (*at, key))]
    return found


@st.composite
def spoilt(draw: st.DrawFn, data: Any) -> Any:
    """Plain data of which up to three places hold something else, are gone, or are there twice; data is changed."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(data)))
        if not place:
            return draw(values)
        holder = data
        for key in place[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["change", "drop", "more"]))
        if how == "change":
            holder[place[-1]] = draw(values)
        elif how == "drop":
            del holder[place[-1]]
        elif isinstance(holder, list):
            holder.append(holder[place[-1]])
        else:
            holder[draw(st.text(max_size=8))] = draw(values)
    return data
