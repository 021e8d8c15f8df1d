"""Checkpoints: the file's form, the copy in memory, and what happens when writing ends at any moment."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.checkpoint.fault import FaultStorage, disk_full
from unisono.checkpoint.format import BLOCK_BYTES, Entry, FileLayout, joined_crc
from unisono.checkpoint.plain import from_plain, to_plain
from unisono.checkpoint.reader import Checkpoint, DamagedError, TensorFile, checkpoints_in, find
from unisono.checkpoint.snapshot import Part, SnapshotMemory
from unisono.checkpoint.storage import LocalStorage, Storage
from unisono.checkpoint.writer import Draft, Writer
from unisono.errors import InputError
from unisono.numerics.layout import FlatLayout
from unisono.strategy.saved import shards_of

TENSORS = {
    "wide": torch.arange(300_000, dtype=torch.float64),
    "layer.weight": torch.arange(600.0).view(20, 30),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "count": torch.tensor(5),
    "mask": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 3),
}


@given(st.binary(max_size=300), st.binary(max_size=3000))
def test_checksums_are_joined(one: bytes, other: bytes) -> None:
    assert joined_crc(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


def layout_of(tensors: dict[str, torch.Tensor]) -> FileLayout:
    return FileLayout.of([Entry.of(name, tensor) for name, tensor in tensors.items()])


def parts_of(tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> list[Part]:
    layout = layout_of(tensors)
    parts = [Part(file, 0, torch.tensor(list(layout.header), dtype=torch.uint8))]
    for name, tensor in tensors.items():
        if tensor.numel():
            parts.append(Part(file, layout.starts[name], tensor.reshape(-1)))
    return parts


def test_a_layout_is_that_of_the_library(tmp_path: Path) -> None:
    layout = layout_of(TENSORS)
    data = bytearray(layout.num_bytes)
    for part in parts_of(TENSORS):
        data[part.offset : part.stop] = part.values.view(torch.uint8).numpy().tobytes()
    (tmp_path / "mine").write_bytes(data)
    found = safetensors.torch.load_file(tmp_path / "mine")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    again = FileLayout.read(bytes(data))
    assert (again.entries, dict(again.starts), again.num_bytes) == (layout.entries, dict(layout.starts), len(data))
    assert layout_of(dict(reversed(TENSORS.items()))) == layout, "names decide, and not who came first"


def test_a_file_of_another_writer_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs.safetensors")
    found = TensorFile(tmp_path / "theirs.safetensors")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
    found["layer.weight"].zero_()
    assert safetensors.torch.load_file(tmp_path / "theirs.safetensors")["layer.weight"].any(), "the file stays"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: b"", "no whole safetensors file"),
        (lambda data: data[:50], "no whole safetensors file"),
        (lambda data: data[:-10], "of 2402849 bytes, in one of the tensors half to mask"),
        (lambda data: b"\xff" * 8 + data[8:], "no whole safetensors file"),
        (lambda data: data.replace(b'"F64"', b'"F65"'), "no whole safetensors file"),
        (lambda data: data.replace(b"[20,30]", b"[20,31]"), "layer.weight has 2400 bytes"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, spoil: Any, says: str) -> None:
    path = tmp_path / "it.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DamagedError, match=says) as error:
        TensorFile(path)
    assert str(path) in str(error.value)


PLAIN = [
    None, True, 3, "text", 1.5, float("inf"), float("-inf"), [1, [2]], (0.9, (1, 2)), {1, 2}, {"a": {"b": ()}},
    {3: "x", (1, 2): [4]}, Counter({2: 1, 4: 2}), {"$tensor": "no mark"}, np.float64(0.1), np.int32(7),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_python_state_comes_back(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_plain(value, "it", tensors), allow_nan=False)
    found = from_plain(json.loads(text), tensors.__getitem__)
    assert found == value
    assert isinstance(found, type(value))


def test_tensors_and_arrays_come_back() -> None:
    value = {"a": [torch.arange(3), {"b": torch.tensor(1.5)}], "c": np.arange(4.0), "nan": float("nan")}
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_plain(value, "it", tensors), allow_nan=False)
    assert set(tensors) == {"it.a.0", "it.a.1.b", "it.c"}
    found = from_plain(json.loads(text), tensors.__getitem__)
    assert torch.equal(found["a"][0], value["a"][0]) and found["a"][1]["b"] == 1.5
    assert np.array_equal(found["c"], value["c"]) and found["nan"] != found["nan"]


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(InputError, match=r"it\.a\.1 is a object"):
        to_plain({"a": [1, object()]}, "it", {})
    with pytest.raises(InputError, match=r"weight is torch.complex128"):
        Entry.of("weight", torch.zeros(1, dtype=torch.complex128))


@pytest.mark.parametrize("limit", [None, 100_000, 9_000])
def test_a_snapshot_holds_the_parts_as_they_were(limit: int | None) -> None:
    memory = SnapshotMemory(limit)
    whole = bytearray(layout_of(TENSORS).num_bytes)
    sizes = []
    for runs in memory.turns(parts_of(TENSORS)):
        sizes.append(sum(len(run.data) for run in runs))
        for run in runs:
            whole[run.offset : run.offset + len(run.data)] = run.data
            assert (np.frombuffer(run.data, np.uint8).ctypes.data - run.offset) % 4096 == 0, (
                "whole pages can be written"
            )
    assert limit is None or max(sizes) <= limit
    assert (len(sizes) == 1) == (limit is None)
    layout = layout_of(TENSORS)
    assert bytes(whole[: len(layout.header)]) == layout.header
    place = layout.starts["layer.weight"]
    assert bytes(whole[place : place + 2400]) == TENSORS["layer.weight"].numpy().tobytes()


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 2, 2), (40, 60)])
@pytest.mark.parametrize("kind", ["plain", "transposed", "channels"])
def test_shards_are_elements_in_row_major_order(shape: tuple[int, ...], kind: str) -> None:
    tensor = torch.arange(float(np.prod(shape))).view(shape)
    if kind == "transposed":
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    elif kind == "channels" and len(shape) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    layout = FlatLayout.of([("first", 10), ("it", tensor.numel())])
    segment = layout.segments[1]
    flat = torch.zeros(layout.total)
    flat.as_strided(tensor.shape, tensor.stride(), segment.offset).copy_(tensor)
    template = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    found = torch.full((tensor.numel(),), torch.nan)
    for cut in (0, segment.numel // 3, segment.numel - 1):
        found.fill_(torch.nan)
        for place in (range(segment.offset, segment.offset + cut), range(segment.offset + cut, segment.stop)):
            for shard in shards_of(segment, template, place, flat[place.start : place.stop]):
                assert found[shard.start : shard.start + len(shard.values)].isnan().all()
                found[shard.start : shard.start + len(shard.values)] = shard.values
        assert torch.equal(found.view(shape), tensor)


# Writing


def write(storage: Storage, step: int, tensors: dict[str, torch.Tensor], others: Storage | None = None) -> list[str]:
    """Lets two ranks write a checkpoint together; returns what went wrong. `others` is rank 1's storage."""
    parts = parts_of(tensors)
    draft = Draft(step, f"try{step}", {"model.safetensors": layout_of(tensors)}, {"step": step})
    writers = [Writer(storage, 0, 2, timeout_s=0.5), Writer(others or storage, 1, 2, timeout_s=0.5)]
    for writer in writers:
        half = draft.num_bytes // 2
        bounds = (0, half) if writer.rank == 0 else (half, draft.num_bytes)
        mine = [part.cut(*bounds) for part in parts if part.offset < bounds[1] and part.stop > bounds[0]]
        writer.write(draft, mine)
    if writers[1].settle():
        writers[0].cancel()
    return [error for writer in reversed(writers) if (error := writer.finish())]


def test_two_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    assert write(LocalStorage(tmp_path), 7, TENSORS) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000007"]
    found = Checkpoint.open(tmp_path / "latest")
    found.check()
    assert (found.step, found.num_bytes) == (7, layout_of(TENSORS).num_bytes)
    assert sorted(path.name for path in found.folder.iterdir()) == ["model.safetensors", "state.json"]
    loaded = safetensors.torch.load_file(found.folder / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    data = (found.folder / "model.safetensors").read_bytes()
    blocks = [data[k : k + BLOCK_BYTES] for k in range(0, len(data), BLOCK_BYTES)]
    said = found.state["files"]["model.safetensors"]
    assert said == {"bytes": len(data), "crc32": [f"{zlib.crc32(block):08x}" for block in blocks]}


class Killed(BaseException):
    pass


def killed() -> None:
    raise Killed


@pytest.fixture
def _quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)


@pytest.mark.usefixtures("_quiet_threads")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, rank: int) -> None:
    """Case 17: of a rank, at every verb of its storage, in the middle of a write too."""
    assert write(LocalStorage(tmp_path), 1, TENSORS) == []
    new = {name: tensor + 1 if tensor.dtype.is_floating_point else tensor for name, tensor in TENSORS.items()}
    for moment in range(100):
        faulty = FaultStorage(LocalStorage(tmp_path), killed, moment)
        write(faulty if rank == 0 else LocalStorage(tmp_path), 2, new, faulty if rank == 1 else LocalStorage(tmp_path))
        folders = checkpoints_in(tmp_path)
        for folder in folders:
            Checkpoint.open(folder).check()
        names = [folder.name for folder in folders]
        assert names in (["step-00000001"], ["step-00000001", "step-00000002"])
        first = safetensors.torch.load_file(folders[0] / "model.safetensors")
        assert torch.equal(first["wide"], TENSORS["wide"])
        if faulty.calls <= moment:
            break
        if len(names) == 2:
            LocalStorage(tmp_path).remove("step-00000002")
        for name in [name for name in LocalStorage(tmp_path).list() if name.startswith(".")]:
            LocalStorage(tmp_path).remove(name)
    assert moment >= (10 if rank == 0 else 5), "it was killed at every one of them"
    assert names == ["step-00000001", "step-00000002"], "and not at last"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, rank: int) -> None:
    assert write(LocalStorage(tmp_path), 1, TENSORS) == []
    for moment in range(4):
        faulty = FaultStorage(LocalStorage(tmp_path), disk_full, moment)
        errors = write(
            *(faulty if rank == 0 else LocalStorage(tmp_path), 2, TENSORS),
            faulty if rank == 1 else LocalStorage(tmp_path),
        )
        told = f"checkpoint step-00000002 could not be written by rank {rank}: No space left on device"
        assert told in errors
        assert [folder.name for folder in checkpoints_in(tmp_path)] == ["step-00000001"]


def test_a_rank_that_does_not_write_is_named(tmp_path: Path) -> None:
    draft = Draft(1, "try", {"model.safetensors": layout_of(TENSORS)}, {"step": 1})
    writer = Writer(LocalStorage(tmp_path), 0, 3, timeout_s=0.05)
    writer.write(draft, parts_of(TENSORS))
    assert "no part of rank 1, 2 appeared within 0.05 s" in str(writer.finish())
    assert checkpoints_in(tmp_path) == []


@pytest.mark.parametrize(
    ("parts", "says"), [(slice(1, None), "byte 0 of"), (slice(0, 3), "byte"), (slice(0, 99), "two")]
)
def test_a_gap_or_an_overlap_is_not_published(tmp_path: Path, parts: slice, says: str) -> None:
    draft = Draft(1, "try", {"model.safetensors": layout_of(TENSORS)}, {"step": 1})
    writer = Writer(LocalStorage(tmp_path), 0, 1, timeout_s=5.0)
    chosen = sorted(parts_of(TENSORS), key=lambda part: part.offset)[parts]
    writer.write(draft, chosen + [chosen[0]] * (says == "two"))
    assert says in str(writer.finish())
    assert checkpoints_in(tmp_path) == []


def test_a_snapshot_does_not_move_with_the_weights(tmp_path: Path) -> None:
    """Case 18."""
    tensors = {"weight": torch.arange(2_000_000.0)}
    writer = Writer(LocalStorage(tmp_path), 0, 1, timeout_s=5.0)
    draft = Draft(1, "try", {"model.safetensors": layout_of(tensors)}, {"step": 1})
    expected = tensors["weight"].clone()
    writer.write(draft, parts_of(tensors))
    tensors["weight"].zero_()
    assert writer.finish() is None
    assert torch.equal(TensorFile(tmp_path / "step-00000001" / "model.safetensors")["weight"], expected)


# Reading


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    assert write(LocalStorage(tmp_path), 5, TENSORS) == []
    return tmp_path / "step-00000005"


def test_a_flipped_bit_names_the_tensor(saved: Path) -> None:
    path = saved / "model.safetensors"
    layout = layout_of(TENSORS)
    for name in ("wide", "layer.weight"):
        data = bytearray(path.read_bytes())
        data[layout.starts[name] + 9] ^= 4
        path.write_bytes(data)
        with pytest.raises(DamagedError, match=r"safetensors is damaged between bytes \d+ and \d+, in .*(wide|layer)"):
            Checkpoint.open(saved).check()
        damaged = [part for part in range(3) if is_damaged(saved, part, 3)]
        assert len(damaged) == 1, "readers share the work"
        data[layout.starts[name] + 9] ^= 4
        path.write_bytes(data)
    Checkpoint.open(saved).check()


def is_damaged(folder: Path, part: int, parts: int) -> bool:
    try:
        Checkpoint.open(folder).check(part, parts)
    except DamagedError:
        return True
    return False


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / "state.json").write_text("{"), "state.json cannot be read"),
        (lambda folder: (folder / "state.json").write_text("{}"), "state.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1_000_000), "ends after 1000000 of"),
    ],
)
def test_what_is_not_whole_is_named(saved: Path, change: Any, says: str) -> None:
    change(saved)
    with pytest.raises(DamagedError, match=says):
        Checkpoint.open(saved).check()


def test_another_format_is_refused(saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(DamagedError, match="has format 99, and this unisono reads format 1"):
        Checkpoint.open(saved)


def test_what_may_be_meant_by_a_path(saved: Path) -> None:
    root = saved.parent
    assert find(saved) == (root, [saved])
    assert find(root) == (root, [saved])
    (root / "run").mkdir()
    with pytest.raises(InputError, match=f"there is no checkpoint in {root / 'run'}"):
        find(root / "run")
    saved.parent.joinpath("run").joinpath("checkpoints").mkdir()
    saved.rename(root / "run" / "checkpoints" / saved.name)
    assert find(root / "run")[1] == [root / "run" / "checkpoints" / saved.name]
    with pytest.raises(InputError, match="there is no folder"):
        find(root / "nothing")
