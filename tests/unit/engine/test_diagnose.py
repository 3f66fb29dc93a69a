"""Diagnose jobs: in real processes over gloo, and their pure parts with wrong results."""

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.versions import driver_version, versions
from engine.diagnose import values
from engine.diagnose.bandwidth import bandwidths
from engine.diagnose.diagnose import pairs_of
from engine.diagnose.findings import Observed, findings, verdict
from engine.diagnose.measuring import Measured, summary
from engine.diagnose.memory import Copy
from engine.diagnose.messages import num_values
from engine.plan.plan import parse_spec, plan
from tests.unit.engine.processes import finish, fork_server_in, start_resolved
from worker.processes.fork_server import ForkServerClient

CPU = torch.device("cpu")
FAULTY = (sys.executable, "-P", "-m", "tests.unit.engine.faulty_links")


# --- values ------------------------------------------------------------------------------------


def test_each_process_position_and_round_sends_other_values():
    base = values.sent(0, 0, 1000, CPU)
    assert values.compare(base, base) is None
    for rank, round_ in ((1, 0), (0, 1), (1, 1), (2, 5)):
        other = values.sent(rank, round_, 1000, CPU)
        wrong = values.compare(other, base)
        assert wrong is not None
        assert wrong.num_wrong > 900, (rank, round_)
    for shift in (1, 4, 64, 256):  # values that arrive in the wrong place
        wrong = values.compare(torch.roll(base, shift), base)
        assert wrong is not None
        assert wrong.num_wrong > 900, shift


@pytest.mark.parametrize("processes", [2, 3, 256])
def test_a_sum_is_exact_in_any_order(processes: int):
    sent = [values.sent(rank, 3, 600, CPU) for rank in range(processes)]
    expected = values.summed(range(processes), 3, 600, CPU)
    assert values.compare(torch.stack(sent).double().sum(0).float(), expected) is None
    backwards = torch.zeros(600)
    for part in reversed(sent):
        backwards += part
    assert values.compare(backwards, expected) is None


@pytest.mark.parametrize("bit", range(32))
def test_each_flipped_bit_is_found(bit: int):
    expected = values.sent(1, 2, 300, CPU)
    received = expected.clone()
    received.view(torch.int32)[123] ^= -(2**31) if bit == 31 else 1 << bit
    wrong = values.compare(received, expected)
    assert wrong is not None
    assert (wrong.num_wrong, wrong.num_values, wrong.first) == (1, 300, 123)
    assert wrong.expected == float(expected[123])


def test_a_missing_share_of_a_sum_is_found():
    expected = values.summed(range(3), 0, 300, CPU)
    for kept in ((0, 1), (0, 2), (1, 2), (0, 1, 1), (0, 1, 2, 2)):
        wrong = values.compare(values.summed(kept, 0, 300, CPU), expected)
        assert wrong is not None
        assert wrong.num_wrong == 300, kept


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "processes", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("send_recv", 4, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(op: str, processes: int, factor: float):
    assert bandwidths(op, 1000, 0.5, processes) == (2000.0, 2000.0 * factor)


def test_a_run_takes_as_long_as_its_slowest_process_and_the_median_counts():
    found = [
        {"times_s": [1.0, 2.0, 9.0], "wrong": None},
        {"times_s": [3.0, 1.0, 1.0], "wrong": {"rank": 1}},
    ]
    whole = summary("all_reduce", 1200, None, found, 2)
    assert (whole.time_s, whole.min_time_s, whole.runs) == (3.0, 2.0, 3)
    assert whole.bandwidth_bytes_per_s == 400.0
    assert whole.as_dict()["correct"] is False
    there_and_back = summary("send_recv", 1200, (0, 1), found, 2)
    assert there_and_back.time_s == 1.5
    assert there_and_back.as_dict()["ranks"] == [0, 1]


def test_an_all_gather_has_as_many_values_of_each_process():
    assert [num_values("all_gather", size, 3) for size in (4, 12, 1024)] == [3, 3, 258]
    assert num_values("all_reduce", 1024, 3) == 256


def test_with_many_processes_only_neighbors_exchange_messages():
    assert pairs_of(3) == [(0, 1), (0, 2), (1, 2)]
    assert len(pairs_of(8)) == 28
    assert pairs_of(9)[-1] == (8, 0)
    assert len(pairs_of(9)) == 9


# --- findings ----------------------------------------------------------------------------------


def measured(op: str, size: int, time_s: float, pair: Any = None, wrong: Any = ()) -> Measured:
    algorithm, bus = bandwidths(op, size, time_s, 3)
    return Measured(op, size, pair, 5, time_s, time_s, algorithm, bus, wrong)


def observed(**changes: Any) -> Observed:
    """What three healthy processes measure: 2 GB/s, in memory of 8 GB/s."""
    size = 16 << 20
    versions_ = {"torch": "2.13.0", "mkl": "2024.2", "onednn": "3.12.0"}
    about = [{"rank": n, "threads": 1, "cores": 4, "versions": dict(versions_)} for n in range(3)]
    pairs = [measured("send_recv", size, 0.01, pair) for pair in pairs_of(3)]
    base: dict[str, Any] = {
        "device": "cpu",
        "backend": "gloo",
        "has_backend": True,
        "processes": about,
        "collectives": [measured("all_reduce", size, 0.01), *pairs],
        "copies": [Copy(n, "cpu", "cpu", 64 << 20, 0.008, 8e9, correct=True) for n in range(3)],
        "machine": "x86_64",
    }
    return Observed(**base | changes)


def rules(seen: Observed) -> list[str]:
    return [item.rule for item in findings(seen)]


def test_nothing_is_found_where_nothing_is_wrong():
    seen = observed()
    assert findings(seen) == []
    text = verdict(seen, [])
    assert text.startswith("No problem found: 3 processes received correct values")
    assert "2.24 GB/s" in text


def test_wrong_values_come_first_and_name_the_process():
    wrong = ({"rank": 2, "run": 1, "first": 5, "num_wrong": 1},)
    bad = [measured("broadcast", 1024, 1e-4, wrong=wrong), *observed().collectives]
    about = [one | {"threads": 4} for one in observed().processes]
    seen = observed(collectives=bad, processes=about)
    found = findings(seen)
    assert [item.rule for item in found] == ["wrong_values", "cpu_oversubscription"]
    assert found[0].evidence["ranks"] == [2]
    text = verdict(seen, found)
    assert text.startswith("Wrong values arrived in process 2: broadcast of 1024 bytes.")
    assert "Do not train on these devices." in text
    assert text.endswith("There is 1 more finding.")
    shown = found[0].as_dict(0)
    assert shown["id"] == "wrong_values-0"
    assert {"rule", "severity", "evidence", "causes", "remedies"} < shown.keys()


def test_one_slow_pair_of_three_is_named():
    others = [item for item in observed().collectives if item.op != "send_recv"]
    for factor, expected in ((1.9, []), (2.1, ["slow_pair"])):
        pairs = [
            measured("send_recv", 16 << 20, 0.01 * (factor if pair == (0, 2) else 1), pair)
            for pair in pairs_of(3)
        ]
        seen = observed(collectives=[*others, *pairs])
        assert rules(seen) == expected
    assert findings(seen)[0].evidence["pairs"][0]["ranks"] == (0, 2)
    small = [measured("send_recv", 1024, 1e-4 * (1 + 5 * n), (0, n)) for n in range(3)]
    assert rules(observed(collectives=small)) == [], "latencies of small messages vary"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"collectives": [measured("all_reduce", 16 << 20, 1.0)]}, "slow_communication"),
        ({"has_backend": False, "backend": "nccl", "collectives": []}, "backend_unavailable"),
        ({"failure": ("broadcast of 4 bytes", "NCCL error")}, "communication_failed"),
        (
            {"copies": [Copy(1, "cpu", "cpu", 64, 1e-9, 8e9, correct=False)]},
            "wrong_copy",
        ),
    ],
)
def test_each_rule_finds_what_it_is_for(changes: dict[str, Any], rule: str):
    assert rules(observed(**changes)) == [rule]


def test_processes_of_different_versions_and_without_mkl_are_found():
    about = [json.loads(json.dumps(one)) for one in observed().processes]
    about[1]["versions"]["torch"] = "2.12.0"
    (found,) = findings(observed(processes=about))
    assert found.evidence == {"versions": {"torch": ["2.13.0", "2.12.0", "2.13.0"]}}
    about = [{**one, "versions": {"torch": "2.13.0"}} for one in about]
    (found,) = findings(observed(processes=about))
    assert found.rule == "no_cpu_libraries"
    assert "MKL and oneDNN" in found.summary
    assert rules(observed(processes=about, machine="aarch64")) == []


# --- runs --------------------------------------------------------------------------------------


def resolved(processes: int, *sizes: int) -> dict[str, Any]:
    spec: dict[str, Any] = {"kind": "diagnose", "sizes_bytes": [*sizes]}
    if processes > 1:
        spec["parallel"] = {"strategy": "data", "processes": processes}
    return plan(parse_spec(spec), {})["spec"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ForkServerClient]:
    """A fork server whose ranks damage messages if ``FAULT`` says so."""
    with fork_server_in(tmp_path_factory.mktemp("server"), FAULTY) as found:
        yield found


def outcome(
    server: ForkServerClient, directory: Path, spec: dict[str, Any], fault: str = ""
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a job; its result, and the ``end`` of each process."""
    ranks = start_resolved(server, directory, spec, directory, env={"FAULT": fault})
    records = finish(ranks, directory)
    (result,) = [item["result"] for item in records[0] if item["type"] == "result"]
    assert all([item["type"] for item in others] == ["end"] for others in records[1:])
    return result, [item[-1] for item in records]


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_measure_and_check_each_operation(
    server: ForkServerClient, tmp_path: Path, processes: int
):
    sizes = (1024, 100_000)
    result, ends = outcome(server, tmp_path, resolved(processes, *sizes))
    assert [end["state"] for end in ends] == ["succeeded"] * processes
    found = [(item["op"], item["size_bytes"], item["ranks"]) for item in result["collectives"]]
    pairs = [[*pair] for pair in pairs_of(processes)]
    expected = [(op, n, None) for op in ("all_reduce", "all_gather", "broadcast") for n in sizes]
    assert found == expected + [("send_recv", n, pair) for n in sizes for pair in pairs]
    for item in result["collectives"]:
        assert item["correct"] is True
        assert 0 < item["min_time_s"] <= item["time_s"]
        moved = (
            100_008
            if (item["op"], processes, item["size_bytes"]) == ("all_gather", 3, 100_000)
            else item["bandwidth_bytes_per_s"] * item["time_s"]
        )
        assert item["bandwidth_bytes_per_s"] == pytest.approx(moved / item["time_s"])
        assert moved == pytest.approx(item["size_bytes"], rel=0.01)
    assert result["latency_s"].keys() == {"all_reduce", "all_gather", "broadcast", "send_recv"}
    assert [copy["rank"] for copy in result["memory"]["copies"]] == [*range(processes)]
    assert all(copy["correct"] for copy in result["memory"]["copies"])
    assert [one["rank"] for one in result["processes"]] == [*range(processes)]
    assert len({one["pid"] for one in result["processes"]}) == processes
    assert result["versions"]["torch"] == torch.__version__
    assert result["backend"] == "gloo"
    problems = [item for item in result["findings"] if item["severity"] == "problem"]
    assert problems == []


@pytest.mark.long
def test_one_process_measures_its_memory(server: ForkServerClient, tmp_path: Path):
    result, _ = outcome(server, tmp_path, resolved(1, 1024))
    assert result["collectives"] == []
    (copy,) = result["memory"]["copies"]
    assert (copy["from"], copy["to"], copy["correct"]) == ("cpu", "cpu", True)
    assert copy["bandwidth_bytes_per_s"] == pytest.approx(copy["size_bytes"] / copy["time_s"])
    assert "copies in memory run at" in result["verdict"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "op", "rank"),
    [
        ("flip:all_reduce:1", "all_reduce", 1),
        ("flip:all_gather:0", "all_gather", 0),
        ("flip:broadcast:1", "broadcast", 1),
        ("flip:recv:1", "send_recv", 1),
    ],
)
def test_a_bit_flipped_in_transit_is_found(
    server: ForkServerClient, tmp_path: Path, fault: str, op: str, rank: int
):
    result, ends = outcome(server, tmp_path, resolved(2, 1024, 4096), fault)
    assert {end["state"] for end in ends} == {"succeeded"}
    wrong = [
        (item["op"], item["size_bytes"]) for item in result["collectives"] if not item["correct"]
    ]
    assert wrong == [(op, 1024), (op, 4096)]
    first = result["findings"][0]
    assert (first["rule"], first["severity"]) == ("wrong_values", "problem")
    assert first["evidence"]["ranks"] == [rank]
    mismatch = first["evidence"]["measurements"][0]["wrong"][0]
    assert (mismatch["first"], mismatch["num_wrong"]) == (63, 1)
    assert mismatch["expected"] != mismatch["received"]
    assert result["verdict"].startswith(f"Wrong values arrived in process {rank}: {op}")


@pytest.mark.long
def test_an_operation_that_fails_is_named_and_what_was_measured_before_is_kept(
    server: ForkServerClient, tmp_path: Path
):
    result, ends = outcome(server, tmp_path, resolved(2, 1024, 4096), "fail:broadcast:0")
    assert ends[0]["state"] == "failed"
    assert ends[0]["error"]["code"] == "device_failed"
    assert ends[1]["state"] == "failed"
    assert {item["op"] for item in result["collectives"]} == {"all_reduce", "all_gather"}
    found = result["findings"][0]
    assert found["rule"] == "communication_failed"
    assert found["evidence"]["operation"] == "broadcast of 1024 bytes"
    assert found["evidence"]["message"].startswith("NCCL error: unhandled system error")


@pytest.mark.long
def test_a_process_that_dies_fails_the_others_which_report_it(
    server: ForkServerClient, tmp_path: Path
):
    ranks = start_resolved(
        server, tmp_path, resolved(2, 1024), tmp_path, env={"FAULT": "die:all_gather:1"}
    )
    exit_ = ranks[1].wait(60)
    assert exit_ is not None
    assert exit_.signal == 9
    records = finish(ranks[:1], tmp_path)[0]
    assert records[-1]["error"]["code"] == "peer_lost"
    (result,) = [item["result"] for item in records if item["type"] == "result"]
    assert result["findings"][0]["evidence"]["operation"] == "all_gather of 1024 bytes"
    ranks[1].close()


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Sat Aug 19 2026\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
    ],
)
def test_the_version_of_the_driver_is_read_of_both_kernel_modules(text: str, tmp_path):
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == "580.159.04"
    assert driver_version(tmp_path / "none") is None


def test_versions_are_those_of_this_torch():
    found = versions()
    assert found["torch"] == torch.__version__
    assert (found["mkl"] is not None) == torch.backends.mkl.is_available()
    assert (found["onednn"] is not None) == torch.backends.mkldnn.is_available()
    assert found["cuda"] == torch.version.cuda
