"""Hypothesis strategies: any JSON, and valid JSON of which one part was replaced by any JSON."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 1, 2, "device", "edge", "none", 1e308, 1e-320])
    | st.floats()
    | st.text(max_size=8)
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value, the whole first."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [prefix, *(path for key, inner in items for path in paths(inner, (*prefix, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of `value` with the part at `path` replaced."""
    if not path:
        return new
    value = copy.deepcopy(value)
    part = value
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = new
    return value


def damaged(valid: Any) -> st.SearchStrategy[Any]:
    """Valid JSON with one part replaced by any JSON."""
    return st.builds(
        lambda path, new: replaced(valid, path, new), st.sampled_from(paths(valid)), ANY_JSON
    )
