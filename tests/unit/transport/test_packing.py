"""What goes in comes out equal, and nothing else gets through."""

import collections
import dataclasses
import enum
import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hiertrain.topology import Link, Tier, Topology
from lightning_hiertrain.transport import pack, unpack
from lightning_hiertrain.transport.wire import Incoming, encode, packed_bytes

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = "red"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Rank(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    value: float


def travel(value):
    """Sends a value through JSON and bytes, in chunks of 7 bytes."""
    outgoing = encode("tag", value)
    incoming = Incoming(outgoing.head_bytes, outgoing.total_bytes)
    while chunk := outgoing.take(7):
        for piece in chunk:
            message = incoming.feed([memoryview(bytes(piece))])
    return message.value()


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.numel():
            raw_a, raw_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
            assert torch.equal(raw_a, raw_b)
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert len(a) == len(b)
        for (key_a, value_a), (key_b, value_b) in zip(a.items(), b.items(), strict=True):
            assert_same(key_a, key_b)
            assert_same(value_a, value_b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for item_a, item_b in zip(a, b, strict=True):
            assert_same(item_a, item_b)
    elif isinstance(a, float) and math.isnan(a):
        assert math.isnan(b)
    elif isinstance(a, complex):
        assert_same([a.real, a.imag], [b.real, b.imag])
    else:
        assert a == b
        assert repr(a) == repr(b) or isinstance(a, (set, frozenset))


hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=20),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=30))])),
    st.times(),
    st.timedeltas(),
    st.sampled_from([Colour.RED, Access.READ, Access.READ | Access.WRITE, Access(0), Rank.FIRST]),
    st.builds(Path, st.sampled_from(["a/b", "/tmp/x", "."])),
    st.builds(torch.Size, st.lists(st.integers(0, 5), max_size=4)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.device("cpu")]),
)
dtypes = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    numbers = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0))
    tensor = numbers.to(draw(st.sampled_from(dtypes)))
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


arrays = st.sampled_from(
    [
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 3), np.uint16),
        np.array(2.5),
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.arange(4, dtype=">i4"),
        np.float64(2.5),
        np.int8(3),
        np.str_("text"),
        np.bool_(True),
        np.array([], dtype="U1"),
    ]
)
values = st.recursive(
    st.one_of(hashable, st.floats(), st.complex_numbers(), tensors(), arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(collections.OrderedDict),
        st.builds(Point, inner, inner),
    ),
    max_leaves=15,
)


@given(values)
def test_a_value_arrives_as_it_was(value):
    assert_same(travel(value), value)


@given(st.sets(hashable) | st.frozensets(hashable))
def test_a_set_arrives_as_it_was(value):
    assert_same(travel(value), value)


def test_dataclasses_arrive_without_running_their_code():
    topology = Topology(
        tiers=(Tier(name="device"), Tier(name="edge")), links=(Link(between=("device", "edge")),)
    )
    sample = travel(Sample(image=torch.ones(2), label=3))

    assert travel(topology) == topology
    assert (sample.label, sample.image.tolist()) == (3, [1.0, 1.0])
    assert travel(Slotted(value=2.0)) == Slotted(value=2.0)
    assert travel(bytearray(b"ab")) == bytearray(b"ab")


def test_the_skeleton_is_json_and_tensors_are_detached():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    skeleton, tensors = pack({"w": weight, "same": weight, "nan": float("nan")})

    assert json.loads(json.dumps(skeleton, allow_nan=False)) == skeleton
    assert len(tensors) == 1
    assert not tensors[0].requires_grad
    assert tensors[0].data_ptr() == weight.data_ptr()
    arrived = unpack(skeleton, tensors)
    assert arrived["w"] is arrived["same"]


def test_conjugate_views_arrive_resolved():
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()

    assert torch.equal(travel(value), value)


def test_packed_bytes_counts_tensors_and_head():
    assert 4_000 < packed_bytes(torch.zeros(1_000)) < 4_100


class Stranger:
    pass


def local_class():
    @dataclasses.dataclass
    class Local:
        value: int

    return Local(value=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"meta": [1, 2, 3, Stranger()]}, r"value\['meta'\]\[3\] is a .*Stranger"),
        ([print], r"value\[0\] is a builtins.builtin_function"),
        ([torch.nn.Linear(1, 1)], r"value\[0\] is a torch.nn.modules.linear.Linear"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, dtype=[("a", "i4")]), "cannot travel"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "device meta"),
        (local_class(), "other tiers cannot find"),
        (collections.defaultdict(list), "collections.defaultdict"),
        (type("MyInt", (int,), {})(3), "MyInt"),
        (Sample(image=Stranger()), r"value.image is a .*Stranger"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(value, message):
    with pytest.raises(TypeError, match=message):
        pack(value)


def test_a_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper than 100"):
        pack(value)


@pytest.mark.parametrize(
    "skeleton",
    [
        {},
        {"$": "system"},
        {"$": ["dict"]},
        {"$": "tensor", "at": 0},
        {"$": "tensor", "at": -1},
        {"$": "tensor", "at": True},
        {"$": "dict", "keys": [1], "values": []},
        {"$": "dict", "keys": [[1]], "values": [1]},
        {"$": "float", "text": "1e9"},
        {"$": "dtype", "name": "load"},
        {"$": "enum", "class": "os:system", "name": "x"},
        {"$": "enum", "class": "enum:Enum", "name": "x"},
        {"$": "dataclass", "class": "subprocess:Popen", "fields": [], "values": []},
        {"$": "dataclass", "class": f"{__name__}:Sample", "fields": ["other"], "values": [1]},
        {"$": "namedtuple", "class": f"{__name__}:Point", "items": [1]},
        {"$": "namedtuple", "class": f"{__name__}:Sample", "items": []},
        {"$": "enum", "class": f"{__name__}:Colour", "value": 3},
        {"$": "date", "text": "yesterday"},
        {"$": "array", "dtype": "O", "shape": [1], "at": 0},
        {"$": "complex", "parts": ["1", 2]},
        {"$": "size", "items": ["a"]},
        {"$": "timedelta", "parts": [10**20]},
    ],
)
def test_a_skeleton_that_pack_did_not_make_is_refused(skeleton):
    with pytest.raises(
        ValueError, match=r"not a packed value|not a .* that|fields|no dtype|no member"
    ):
        unpack(skeleton, [])


def test_a_class_that_is_not_imported_is_not_imported():
    skeleton = {"$": "dataclass", "class": "antigravity:Fly", "fields": [], "values": []}
    with pytest.raises(ValueError, match=r"antigravity.Fly is not a dataclass that this tier"):
        unpack(skeleton, [])


def test_dates_and_times_keep_their_fold():
    moment = datetime(2024, 10, 27, 2, 30, fold=1)
    assert travel([moment, time(2, fold=1), date(2024, 1, 1)])[0].fold == 1
