"""One suite for every implementation of `Collectives`, bare and wrapped."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.fakes import ThreadCollectives, run_threads
from tests.worlds import Outcome, outcomes_of_world, run_world
from unisono.comm.api import Collectives, Loan, Pending
from unisono.comm.c10d import C10dCollectives
from unisono.comm.fault import Fault, FaultyCollectives
from unisono.comm.local import LocalCollectives
from unisono.comm.record import Call, RecordingCollectives
from unisono.comm.shm import ShmCollectives
from unisono.errors import CommError

WORLDS = ["local-1", "c10d-1", "c10d-2", "c10d-3", "c10d-4", "shm-2", "shm-3", "shm-4", "threads-1", "threads-3"]
OF_PROCESSES = ("c10d", "shm")
TRANSPORTS = {"c10d": "gloo", "shm": "shm"}
WRAPPERS = ["bare", "recording", "faulty", "both"]
# Long for a machine that does nothing else, short for a test that waits it out.
SHORT_S = 1.5


def wrapped(comm: Collectives, wrapper: str) -> Collectives:
    if wrapper in ("recording", "both"):
        comm = RecordingCollectives(comm)
    # Its faults are due on a rank that does not exist, or only delay.
    faults = [Fault(99, "any", 0, "kill"), Fault(0, "all_gather", 1, "delay", delay_s=0.02)]
    return FaultyCollectives(comm, faults) if wrapper in ("faulty", "both") else comm


@contextlib.contextmanager
def session(timeout_s: float = 60.0) -> Iterator[Any]:
    """The real thing, on this rank of a test world; a world of one gets a process group all the same."""
    alone = "RANK" not in os.environ
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with unisono.init(timeout_s=timeout_s) as run:
            yield run._session.comm
    finally:
        if alone:
            dist.destroy_process_group()


def in_session(kind: str, check: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with session() as comm:
        assert type(comm) is {"c10d": C10dCollectives, "shm": ShmCollectives}[kind]
        return check(comm, *args)


def everywhere(world: str, check: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns `check(comm, *args)` of every rank of a world such as "c10d-3"."""
    kind, size = world.split("-")
    if kind == "local":
        return [check(LocalCollectives(), *args)]
    if kind == "threads":
        return run_threads(int(size), lambda comm: check(comm, *args))
    return run_world(int(size), in_session, kind, check, args, transport=TRANSPORTS[kind])


def stamp(frm: int, to: int, piece: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that say where they come from and where they are to go."""
    return torch.arange(numel).add(1000 * frm + 100 * to + 10 * piece).to(dtype)


def sizes_between(frm: int, to: int) -> list[int]:
    """How many pieces, and how large: another list for every pair, with empty pieces and empty lists."""
    lists = [[3], [], [0, 5, 1], [0], [2_000, 7], [1, 0, 0, 4]]
    return lists[(3 * frm + 2 * to) % len(lists)]


# What every implementation does


def exchanges(comm: Collectives, wrapper: str) -> None:
    comm = wrapped(comm, wrapper)
    rank, peers = comm.rank, range(comm.world_size)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        sends = [[stamp(rank, to, k, n, dtype) for k, n in enumerate(sizes_between(rank, to))] for to in peers]
        takes = [[torch.full((n,), -1, dtype=dtype) for n in sizes_between(frm, rank)] for frm in peers]
        kept = [part.clone() for part in takes[rank]]
        comm.exchange_shards(sends, takes).wait()
        for frm in peers:
            for k, part in enumerate(takes[frm]):
                wanted = kept[k] if frm == rank else stamp(frm, rank, k, len(part), dtype)
                assert torch.equal(part, wanted), f"rank {rank} got {part} from {frm}, wanted {wanted}"


def gathers(comm: Collectives, wrapper: str) -> None:
    comm = wrapped(comm, wrapper)
    for round_number in range(3):
        sizes = [[4, 0], [], [1, 2, 3], [33]]
        parts = [[torch.full((n,), -1.0) for n in sizes[rank]] for rank in range(comm.world_size)]
        for k, part in enumerate(parts[comm.rank]):
            part.copy_(stamp(comm.rank, round_number, k, len(part)))
        comm.all_gather(parts).wait()
        for rank in range(comm.world_size):
            assert [len(part) for part in parts[rank]] == sizes[rank]
            for k, part in enumerate(parts[rank]):
                assert torch.equal(part, stamp(rank, round_number, k, len(part)))


def broadcasts(comm: Collectives, wrapper: str) -> None:
    comm = wrapped(comm, wrapper)
    for src in range(comm.world_size):
        tensors = [
            torch.full((3, 2), float(comm.rank)),
            torch.tensor(comm.rank),
            torch.full((2, 3, 2, 2), float(comm.rank)).to(memory_format=torch.channels_last),
            torch.full((4,), comm.rank % 2 == 1),
            torch.empty(0),
        ]
        if comm.rank == src:
            tensors[0][1, 1] = 7.5
            tensors[2][1, 2, 1, 0] = 8.5
        comm.broadcast(tensors, src)
        first = torch.full((3, 2), float(src))
        first[1, 1] = 7.5
        third = torch.full((2, 3, 2, 2), float(src))
        third[1, 2, 1, 0] = 8.5
        assert torch.equal(tensors[0], first)
        assert tensors[1].item() == src
        assert torch.equal(tensors[2], third)
        assert tensors[3].tolist() == [src % 2 == 1] * 4
    comm.broadcast([])


def gathers_objects(comm: Collectives, wrapper: str) -> None:
    comm = wrapped(comm, wrapper)
    mine = {"rank": comm.rank, "text": "x" * (10_000 * comm.rank), "nothing": None}
    found = comm.gather_objects(mine)
    assert [item["rank"] for item in found] == list(range(comm.world_size))
    assert [len(item["text"]) for item in found] == [10_000 * rank for rank in range(comm.world_size)]
    assert comm.gather_objects(None) == [None] * comm.world_size


def flies(comm: Collectives, wrapper: str) -> None:
    """Many exchanges in flight at once, waited for out of order, and by each rank in another one."""
    comm = wrapped(comm, wrapper)
    rank, peers, flights = comm.rank, range(comm.world_size), []
    for number in range(12):
        if number % 3 == 2:
            parts = [[torch.full((20 + number,), -1.0)] for _ in peers]
            parts[rank][0].copy_(stamp(rank, 0, number, 20 + number))
            flights.append((comm.all_gather(parts), parts, [stamp(r, 0, number, 20 + number) for r in peers]))
        else:
            sends = [[stamp(rank, to, number, 5 + to)] for to in peers]
            takes = [[torch.full((5 + rank,), -1.0)] for _ in peers]
            flights.append(
                (comm.exchange_shards(sends, takes), takes, [stamp(r, rank, number, 5 + rank) for r in peers])
            )
    for number in sorted(range(12), key=lambda n: (n * 7 + rank * 5) % 12):
        pending, takes, wanted = flights[number]
        assert isinstance(pending, Pending)
        pending.wait()
        pending.wait()  # nothing more to wait for
        for peer in peers:
            if peer != rank:
                assert torch.equal(takes[peer][0], wanted[peer])


def overtakes(comm: Collectives, wrapper: str) -> None:
    """Calls match within a channel; which channel comes first may differ from rank to rank."""
    comm = wrapped(comm, wrapper)
    rank, peers, flights = comm.rank, range(comm.world_size), []
    for number in range(3):
        for channel in (1, 2, 3) if rank % 2 else (3, 1, 2):
            frm = [[torch.full((6,), -1.0)] for _ in peers]
            if channel == 3:
                frm[rank][0].copy_(stamp(rank, channel, number, 6))
                pending = comm.all_gather(frm, channel=channel)
            else:
                sends = [[stamp(rank, channel, number, 6)] for _ in peers]
                pending = comm.exchange_shards(sends, frm, channel=channel)
            flights.append((pending, frm, [stamp(peer, channel, number, 6) for peer in peers]))
    for pending, found, wanted in flights:
        pending.wait()
        for peer in peers:
            if peer != rank:
                assert torch.equal(found[peer][0], wanted[peer])


def meets(comm: Collectives, wrapper: str) -> list[float]:
    """When this rank entered and left each of three barriers, to which each comes last once."""
    comm = wrapped(comm, wrapper)
    times = []
    for late in range(3):
        if comm.rank == late % comm.world_size:
            time.sleep(0.05)
        times.append(time.monotonic())
        comm.barrier(f"round {late}")
        times.append(time.monotonic())
    return times


def describes_itself(comm: Collectives, wrapper: str) -> tuple[int, int]:
    comm = wrapped(comm, wrapper)
    assert isinstance(comm, Collectives)
    return comm.rank, comm.world_size


def lends(comm: Collectives, wrapper: str) -> None:
    """What is lent may be written to; what was sent is the sender's again when all have done with it."""
    comm = wrapped(comm, wrapper)
    rank, peers, length, inboxes = comm.rank, range(comm.world_size), 2_000, []

    def inbox(numel: int) -> torch.Tensor:
        inboxes.append(torch.full((numel,), -1.0))
        return inboxes[-1]

    for number in range(6):
        counts = [(peer + number) % 3 for peer in peers]
        sizes = [[length] * count for count in counts]
        # In memory that is quick to send, and in memory that is not.
        memory = comm.empty(3 * length, torch.float32, torch.device("cpu")) if number % 2 else torch.empty(3 * length)
        assert memory.shape == (3 * length,) and memory.dtype == torch.float32
        pieces = list(memory.split(length))
        for k, piece in enumerate(pieces):
            piece.copy_(stamp(rank, 0, k, length))
        for channel in (1, 2):  # a second loan of the same, before the first is done with
            sends = [[] if peer == rank else pieces[: counts[rank]] for peer in peers]
            loan = comm.lend_shards(sends, sizes, inbox, channel=channel)
            assert isinstance(loan, Loan)
            found = loan.received()
            for peer in peers:
                assert len(found[peer]) == (0 if peer == rank else counts[peer])
                for k, part in enumerate(found[peer]):
                    assert torch.equal(part, stamp(peer, 0, k, length))
            loan.done()
            loan.drain()
        for piece in pieces:
            piece.fill_(-2.0)
    kept = [comm.empty(n, torch.bfloat16, torch.device("cpu")).fill_(n) for n in (0, 1, 5, 100_000)]
    assert [(len(part), part.sum().item()) for part in kept[:3]] == [(0, 0.0), (1, 1.0), (5, 25.0)]


def writes_to_what_it_is_lent(comm: Collectives, wrapper: str) -> None:
    """As a reduction does: each rank owns a shard of everybody's vector, and adds up in place."""
    comm = wrapped(comm, wrapper)
    rank, peers, length = comm.rank, range(comm.world_size), 3_000
    flat = comm.empty(length * comm.world_size, torch.float32, torch.device("cpu"))
    for number in range(5):
        flat.copy_(torch.arange(flat.numel()) + rank + number)
        sends = [list(flat[peer * length : (peer + 1) * length].split(length)) for peer in peers]
        sizes = [[] if peer == rank else [length] for peer in peers]
        loan = comm.lend_shards(sends, sizes, torch.empty, channel=4)
        total = flat[rank * length : (rank + 1) * length].clone()
        for parts in loan.received():
            for part in parts:
                total = part.add_(total)
        mine = flat[rank * length : (rank + 1) * length].copy_(total)
        loan.done()
        shards = [[flat[peer * length : (peer + 1) * length]] for peer in peers]
        assert shards[rank][0].data_ptr() == mine.data_ptr()
        comm.all_gather(shards, channel=2).wait()
        wanted = (torch.arange(flat.numel()) + number) * comm.world_size + sum(peers)
        assert torch.equal(flat, wanted.float())


CHECKS = [
    lends,
    writes_to_what_it_is_lent,
    exchanges,
    gathers,
    broadcasts,
    gathers_objects,
    flies,
    overtakes,
    describes_itself,
    meets,
]


def all_checks(comm: Collectives, wrapper: str) -> dict[str, Any]:
    return {check.__name__: check(comm, wrapper) for check in CHECKS}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("world", [world for world in WORLDS if not world.startswith(OF_PROCESSES)])
def test_the_verbs(world: str, wrapper: str) -> None:
    judge(everywhere(world, all_checks, wrapper))


def every_wrapper(comm: Collectives) -> list[dict[str, Any]]:
    return [all_checks(comm, wrapper) for wrapper in WRAPPERS]


@pytest.mark.parametrize("world", [world for world in WORLDS if world.startswith(OF_PROCESSES)])
def test_the_verbs_between_processes(world: str) -> None:
    for found in zip(*everywhere(world, every_wrapper), strict=True):
        judge(list(found))


def judge(found: Sequence[dict[str, Any]]) -> None:
    size = len(found)
    assert [rank["describes_itself"] for rank in found] == [(rank, size) for rank in range(size)]
    times = [rank["meets"] for rank in found]
    for number in range(0, 6, 2):
        last_came = max(mine[number] for mine in times)
        assert all(mine[number + 1] >= last_came for mine in times), "a rank left a barrier before all had come"


# What is recorded


def counts_bytes(comm: Collectives) -> tuple[list[Call], dict[str, int]]:
    """Returns what was recorded, and the bytes that in fact came from others, by verb."""
    recording = RecordingCollectives(comm)
    rank, peers, came = comm.rank, range(comm.world_size), {}
    for dtype in (torch.float64, torch.bfloat16):
        sends = [[stamp(rank, to, k, n, dtype) for k, n in enumerate(sizes_between(rank, to))] for to in peers]
        takes = [[torch.empty(n, dtype=dtype) for n in sizes_between(frm, rank)] for frm in peers]
        recording.exchange_shards(sends, takes).wait()
        came["exchange_shards"] = came.get("exchange_shards", 0) + storage_bytes(takes, rank)
    parts = [[torch.zeros(3 + r, dtype=torch.int16), torch.zeros(r, dtype=torch.complex64)] for r in peers]
    sizes = [[] if peer == rank else [7, 7] for peer in peers]
    pieces = [[torch.zeros(7), torch.zeros(7)] for _ in peers]
    recording.lend_shards(pieces, sizes, torch.empty).received()
    came["lend_shards"] = sum(map(sum, sizes)) * 4
    recording.all_gather(parts).wait()
    came["all_gather"] = storage_bytes(parts, rank)
    tensors = [torch.zeros(5, 2), torch.zeros((), dtype=torch.int64)]
    recording.broadcast(tensors, src=comm.world_size - 1)
    came["broadcast"] = 0 if rank == comm.world_size - 1 else storage_bytes([tensors], None)
    recording.gather_objects("word")
    recording.barrier("here")
    return recording.calls, came


def storage_bytes(parts: Sequence[Sequence[torch.Tensor]], own: int | None) -> int:
    return sum(part.untyped_storage().nbytes() for r, some in enumerate(parts) if r != own for part in some)


@pytest.mark.parametrize("world", WORLDS)
def test_recorded_bytes_are_those_that_arrive(world: str) -> None:
    found = everywhere(world, counts_bytes)
    verbs = [
        "exchange_shards",
        "exchange_shards",
        "lend_shards",
        "all_gather",
        "broadcast",
        "gather_objects",
        "barrier",
    ]
    for calls, _ in found:
        assert [call.verb for call in calls] == verbs
    for verb in ("exchange_shards", "lend_shards", "all_gather", "broadcast"):
        sent = sum(call.num_bytes for calls, _ in found for call in calls if call.verb == verb)
        assert sent == sum(came[verb] for _, came in found)
        assert (sent > 0) == (len(found) > 1)


# What goes wrong on schedule


class Deaf:
    """A `Collectives` that does nothing but count the calls that reach it."""

    rank, world_size, shares_memory = 1, 2, False

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.heard.append(verb)


def call_all(comm: Collectives) -> None:
    comm.exchange_shards([], [])
    comm.lend_shards([], [], torch.empty)
    comm.all_gather([])
    comm.broadcast([])
    comm.gather_objects(0)
    comm.barrier()


VERBS = ["exchange_shards", "lend_shards", "all_gather", "broadcast", "gather_objects", "barrier"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_is_inflicted_at_its_call_and_before_the_verb(verb: str) -> None:
    inner = Deaf()
    comm = FaultyCollectives(inner, [Fault(1, verb, 1, "raise")])
    call_all(comm)
    assert inner.heard == VERBS
    with pytest.raises(RuntimeError, match=f"fault on rank 1 in {verb}, call 1"):
        call_all(comm)
    assert inner.heard == VERBS + VERBS[: VERBS.index(verb)]
    call_all(comm)  # that call has been made: a loop that tries again gets through
    comm.abort()
    assert inner.heard[-7:] == [*VERBS, "abort"]


def test_any_counts_the_calls_of_all_verbs() -> None:
    inner = Deaf()
    comm = FaultyCollectives(inner, [Fault(1, "any", 9, "raise"), Fault(0, "any", 0, "raise")])
    call_all(comm)
    with pytest.raises(RuntimeError, match="broadcast"):
        call_all(comm)
    assert inner.heard == [*VERBS, "exchange_shards", "lend_shards", "all_gather"]


def test_a_delay_delays_and_passes_on() -> None:
    inner = Deaf()
    comm = FaultyCollectives(inner, [Fault(1, "barrier", 0, "delay", delay_s=0.05)])
    started = time.monotonic()
    comm.barrier()
    assert time.monotonic() - started >= 0.05
    assert inner.heard == ["barrier"]
    started = time.monotonic()
    comm.barrier()
    assert time.monotonic() - started < 0.05


# What happens to the others when a rank is gone, hangs, or does something else


def all_have_started() -> None:
    """Waits until every process of the world is there, so that a short time-out need not cover how they start."""
    environ = os.environ
    address, port, size = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ["WORLD_SIZE"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    if store.add("started", 1) == size:
        store.set("all started", "")
    store.wait(["all started"])


def until_the_fault(kind: str, verb: str, timeout_s: float) -> tuple[str, float]:
    """Returns the error that this rank ended with, and how long it waited for it."""
    all_have_started()
    run = unisono.init(timeout_s=timeout_s)
    inner = run._session.comm
    comm = FaultyCollectives(inner, [Fault(1, verb, 1, kind)])
    started = time.monotonic()
    try:
        for _ in range(3):
            started = time.monotonic()
            if verb == "exchange_shards":
                parts = [[torch.zeros(1000)] for _ in range(comm.world_size)]
                comm.exchange_shards(parts, [[torch.zeros(1000)] for _ in parts]).wait()
            elif verb == "barrier":
                comm.barrier("the test's barrier")
            elif verb == "gather_objects":
                comm.gather_objects(1)
            else:
                comm.broadcast([torch.zeros(10)], src=1)
    except CommError as error:
        waited_s = time.monotonic() - started
        run.close(failed=True)
        run.close(failed=True)  # abort is idempotent
        return str(error), waited_s
    raise AssertionError("the fault did not show")


def survivors(outcomes: list[Outcome]) -> list[tuple[str, float]]:
    found = [outcome for rank, outcome in enumerate(outcomes) if rank != 1]
    for outcome in found:
        assert outcome.error is None, outcome.trace
        assert outcome.exit_code == 0
    return [outcome.value for outcome in found]


BOTH = pytest.mark.parametrize("transport", ["gloo", "shm"])


@BOTH
@pytest.mark.parametrize("verb", ["exchange_shards", "broadcast", "gather_objects"])
def test_a_killed_peer_ends_the_wait_with_an_error_that_names_it(verb: str, transport: str) -> None:
    outcomes = outcomes_of_world(3, until_the_fault, "kill", verb, 30.0, transport=transport)
    assert outcomes[1].exit_code == -9
    for message, waited_s in survivors(outcomes):
        assert verb in message
        # On a busy machine the other survivor's word may come after this one's.
        assert re.search(r"no word from ranks? (\d, )*1\b", message), message
        assert waited_s < 15, "the error came only with the time-out"


@BOTH
def test_a_peer_that_is_killed_before_a_barrier_is_named(transport: str) -> None:
    outcomes = outcomes_of_world(3, until_the_fault, "kill", "barrier", SHORT_S, transport=transport)
    assert outcomes[1].exit_code == -9
    for message, _ in survivors(outcomes):
        assert "the test's barrier" in message
        assert "rank 1" in message.partition("missing")[2] + message.partition("no word from")[2]


@BOTH
@pytest.mark.parametrize("verb", ["exchange_shards", "barrier"])
def test_a_hanging_peer_is_named_within_the_timeout(verb: str, transport: str) -> None:
    outcomes = outcomes_of_world(3, until_the_fault, "hang", verb, SHORT_S, timeout_s=SHORT_S + 5, transport=transport)
    assert outcomes[1].exit_code is None or outcomes[1].exit_code < 0
    for message, waited_s in survivors(outcomes):
        assert "no word from rank 1 " in message or "missing: rank 1;" in message
        assert SHORT_S * 0.9 <= waited_s < SHORT_S + 4


def abort_on_rank_1() -> tuple[str, float]:
    run = unisono.init(timeout_s=60)
    comm = run._session.comm
    comm.barrier("the start")
    started, message = time.monotonic(), "aborted"
    if comm.rank == 1:
        time.sleep(0.3)
        comm.abort()
        comm.abort()
        assert not dist.is_initialized()
    else:
        try:
            parts = [[torch.zeros(10)] for _ in range(comm.world_size)]
            comm.exchange_shards(parts, [[torch.zeros(10)] for _ in parts]).wait()
        except CommError as error:
            message = str(error)
    waited_s = time.monotonic() - started
    run.close(failed=True)
    return message, waited_s


@BOTH
def test_an_abort_ends_waiting_peers_at_once(transport: str) -> None:
    found = run_world(3, abort_on_rank_1, transport=transport)
    assert found[1][0] == "aborted"
    for message, waited_s in (found[0], found[2]):
        assert "exchange_shards" in message
        assert "rank 1 stopped" in message
        assert waited_s < 15


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_world_of_one_may_abort_as_often_as_it_likes(wrapper: str) -> None:
    comm = wrapped(LocalCollectives(), wrapper)
    comm.abort()
    comm.abort()


def test_the_ranks_of_threads_name_the_missing_one() -> None:
    def body(comm: ThreadCollectives) -> str:
        if comm.rank == 1:
            return ""
        with pytest.raises(CommError) as caught:
            comm.barrier("the end")
        return str(caught.value)

    found = run_threads(3, body, timeout_s=0.2)
    assert all("the end" in found[rank] and "missing: [1]" in found[rank] for rank in (0, 2))
