import json
import struct
import threading

import pytest

from engine.core.spool import HEADER, SpoolDamaged, SpoolWriter, read_frames

RECORDS = [
    {"type": "metrics", "step": n, "values": {"loss": [0.5, float("nan")][n % 2], "ü": "ß"}}
    for n in range(4)
]
EXPECTED = json.loads(json.dumps(RECORDS).replace("NaN", '"NaN"'))


def _write(path, records=RECORDS):
    spool = SpoolWriter(path)
    for record in records:
        spool.append(record)
    spool.close()


def test_records_come_back_as_they_were_with_nan_by_name(tmp_path):
    _write(tmp_path / "spool")
    records, offset = read_frames(tmp_path / "spool", 0)
    assert records == EXPECTED
    assert offset == (tmp_path / "spool").stat().st_size


def test_a_spool_cut_at_any_byte_gives_its_whole_records_and_continues_later(tmp_path):
    _write(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        records, offset = read_frames(path, 0)
        assert records == EXPECTED[: len(records)]
        assert offset <= length
        path.write_bytes(whole)
        rest, end = read_frames(path, offset)
        assert records + rest == EXPECTED
        assert end == len(whole)


def test_records_can_be_read_a_few_at_a_time(tmp_path):
    _write(tmp_path / "spool")
    found, offset = [], 0
    while True:
        records, offset = read_frames(tmp_path / "spool", offset, max_records=3)
        if not records:
            break
        assert len(records) <= 3
        found += records
    assert found == EXPECTED


def test_a_damaged_frame_with_more_behind_it_is_an_error(tmp_path):
    path = tmp_path / "spool"
    _write(path)
    damaged = bytearray(path.read_bytes())
    damaged[HEADER.size + 3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(SpoolDamaged, match="at 0"):
        read_frames(path, 0)


def test_a_damaged_last_frame_counts_as_not_written_yet(tmp_path):
    path = tmp_path / "spool"
    _write(path)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert read_frames(path, 0)[0] == EXPECTED[:3]


def test_a_frame_that_claims_a_gigabyte_is_damage(tmp_path):
    path = tmp_path / "spool"
    path.write_bytes(struct.pack("<II", 1 << 30, 0) + b"x" * 100)
    with pytest.raises(SpoolDamaged):
        read_frames(path, 0)


def test_a_spool_that_is_not_there_has_no_records(tmp_path):
    assert read_frames(tmp_path / "none", 0) == ([], 0)


def test_threads_may_append_at_once(tmp_path):
    spool = SpoolWriter(tmp_path / "spool")

    def write(number):
        for step in range(200):
            spool.append({"type": "metrics", "thread": number, "step": step})
            spool.settle()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spool.close()
    records, _ = read_frames(tmp_path / "spool", 0, 10_000)
    for number in range(4):
        steps = [item["step"] for item in records if item["thread"] == number]
        assert steps == list(range(200))


def test_figures_come_back_bit_for_bit_with_what_is_nan_or_inf(tmp_path):
    figures = [0.1, -0.0, float("nan"), float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308]
    rows = [["conv1", "output", *figures], ["ü.0", "param_grad", *reversed(figures)]]
    record = {"type": "stats", "step": 3, "rows": rows, "quantiles": [["conv1", "output", 1.0]]}
    empty = {"type": "stats", "step": 4, "rows": []}
    _write(tmp_path / "spool", [record, empty])
    (found, second), _ = read_frames(tmp_path / "spool", 0)
    assert second == empty
    assert {key: found[key] for key in found if key != "rows"} == {
        key: record[key] for key in record if key != "rows"
    }
    for have, want in zip(found["rows"], rows, strict=True):
        assert have[:2] == want[:2]
        assert struct.pack("<7d", *have[2:]) == struct.pack("<7d", *want[2:])
