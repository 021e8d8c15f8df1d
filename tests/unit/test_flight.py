"""The flight record: what is written is what others read, and the newest calls stay."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.comm.flight import ENTRIES, Flight, FlightRecord, flight_name, lives, read_flights
from unisono.errors import InputError
from unisono.verify.hang import look


@pytest.fixture
def record(tmp_path: Path) -> FlightRecord:
    found = FlightRecord(0, 1)
    found.at(7, 2)
    found.end(found.begin("all_gather", 100))
    found.keep_in(tmp_path / "flight")
    return found


def read(folder: Path) -> Flight:
    (found,) = read_flights(folder / "flight")
    return found


def test_what_is_written_is_read(tmp_path: Path, record: FlightRecord) -> None:
    found = read(tmp_path)
    assert (found.rank, found.world_size, found.pid, found.host) == (0, 1, os.getpid(), socket.gethostname())
    (call,) = found.calls
    assert (call.number, call.verb, call.num_bytes, call.step, call.micro_batch) == (1, "all_gather", 100, 7, 2)
    assert call.began_s <= call.ended_s
    assert (found.waits_in, found.failed, found.closed_s) == (0, "", 0.0)
    record.wait_for(record.begin("exchange_shards", 5))
    assert read(tmp_path).waits_in == 2
    assert read(tmp_path).calls[-1].ended_s == 0.0
    record.fail("it broke " + "x" * 1000, consequence=True)
    assert read(tmp_path).failed.startswith("it broke")
    record.close()
    assert read(tmp_path).closed_s > 0
    assert lives(read(tmp_path))
    assert lives(replace(found, host="elsewhere")) is None


def test_the_last_calls_stay(tmp_path: Path, record: FlightRecord) -> None:
    for _ in range(3 * ENTRIES):
        number = record.begin("barrier", 0)
    record.end(number)
    record.end(3)  # long overwritten: nothing may be written for it
    calls = read(tmp_path).calls
    assert [call.number for call in calls] == list(range(number - ENTRIES + 1, number + 1))
    assert [call.ended_s > 0 for call in calls] == [False] * (ENTRIES - 1) + [True]
    record.close()


def test_what_an_earlier_job_left_is_not_taken_for_this_one(tmp_path: Path, record: FlightRecord) -> None:
    earlier = FlightRecord(1, 4)
    earlier._started = 1.0
    earlier.keep_in(tmp_path / "flight")
    (tmp_path / "flight" / flight_name(2)).write_bytes(b"torn")
    assert read(tmp_path).rank == 0
    for one in (earlier, record):
        one.close()


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "flight").write_text("a file")
    record = FlightRecord(0, 2)
    record.keep_in(tmp_path / "flight")
    record.begin("barrier", 0)
    record.close()


def test_a_run_without_records_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no flight records"):
        look(tmp_path)
