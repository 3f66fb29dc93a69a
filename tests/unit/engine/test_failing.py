"""What a rank calls its failures: category, layer, step, and what it knows of the memory."""

import errno
import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.spool import read_frames
from engine.network.layers import LayerFailed
from engine.training import memory
from engine.training.failures import StepFailed, classify
from tests.unit.engine.runs import planned, spec, write_job

GiB = 2**30
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 512.00 MiB is free. Including non-PyTorch memory, this process has 139.29 GiB memory in "
    "use. Of the allocated memory 138.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved."
)


CAPPED = (
    "CUDA out of memory. Tried to allocate 390.62 MiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 138.00 GiB is free. Including non-PyTorch memory, this process has 1.10 GiB memory in "
    "use. 512.00 MiB allowed; Of the allocated memory 392.00 MiB is allocated by PyTorch, and 1.00 "
    "MiB is reserved by PyTorch but unallocated."
)
"""As CUDACachingAllocator.cpp says it after ``set_per_process_memory_fraction``."""


def raised(work) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def in_layer(work, layer: str = "fc", step: int = 4) -> BaseException:
    return StepFailed(step, LayerFailed(layer, raised(work)))


def test_the_devices_own_words_are_read():
    failure = classify(StepFailed(7, LayerFailed("conv1", torch.OutOfMemoryError(CUDA))))
    assert (failure.code, failure.layer, failure.step, failure.rank) == (
        *("out_of_memory", "conv1"),
        *(7, 0),
    )
    memory = failure.as_dict()["memory"]
    assert memory["where"] == "device"
    assert memory["requested_bytes"] == 20 * GiB
    assert memory["free_bytes"] == GiB // 2
    assert memory["limit_bytes"] == round(139.8 * GiB)
    assert "20.0 GiB more was asked for, 512.0 MiB was free" in failure.detail


def test_the_limit_of_a_process_whose_memory_is_capped_is_its_own():
    failure = classify(torch.OutOfMemoryError(CAPPED))
    memory = failure.as_dict()["memory"]
    assert memory["limit_bytes"] == 512 * 2**20
    assert memory["free_bytes"] == 120 * 2**20
    assert "390.6 MiB more was asked for, 120.0 MiB was free" in failure.detail
    assert "there is 512.0 MiB in all" in failure.detail


def test_what_the_cpus_allocator_refuses_is_the_hosts_memory():
    failure = classify(in_layer(lambda: torch.empty(2**60, dtype=torch.uint8)))
    memory = failure.as_dict()["memory"]
    assert failure.category == "out_of_memory"
    assert memory["where"] == "host"
    assert memory["requested_bytes"] == 2**60
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0.5 * peak <= memory["peak_bytes"] <= peak
    assert 0 < memory["free_bytes"] < memory["limit_bytes"]


def test_an_error_of_memory_without_figures_keeps_its_words():
    failure = classify(torch.OutOfMemoryError("HIP out of memory, and no more is said"))
    assert "no more is said" in failure.detail


@pytest.mark.parametrize(
    ("work", "code", "word"),
    [
        (lambda: torch.nn.Linear(3, 2)(torch.zeros(4)), "spec_failed", "shapes"),
        (lambda: torch.nn.Embedding(3, 2)(torch.tensor([5])), "data_failed", "out of range"),
        (lambda: torch.einsum("ij", torch.zeros(3)), "spec_failed", "dimensions"),
    ],
)
def test_an_exception_in_a_layer_is_the_users_and_names_the_layer(work, code: str, word: str):
    failure = classify(in_layer(work))
    assert (failure.code, failure.layer, failure.step) == (code, "fc", 4)
    assert word in failure.detail


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("CUDA error: an illegal memory access was encountered", "device_failed"),
        ("CUDA error: uncorrectable ECC error encountered", "device_failed"),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "device_failed"),
        ("CUDA error: device-side assert triggered", "data_failed"),
        ("CUDA error: out of memory", "out_of_memory"),
    ],
)
def test_errors_of_a_device_are_distinguished(text: str, code: str):
    failure = classify(StepFailed(1, LayerFailed("fc", RuntimeError(text))))
    assert failure.code == code
    assert failure.retryable == (code == "device_failed")


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EIO, "storage_failed")],
)
def test_a_full_disk_differs_from_one_that_is_broken(number: int, code: str):
    assert classify(OSError(number, "x")).code == code


def test_what_is_not_expected_is_the_engines_fault():
    failure = classify(StepFailed(3, KeyError("x")))
    assert (failure.code, failure.category, failure.step) == ("engine_failed", "internal", 3)


@given(st.text(), st.sampled_from([RuntimeError, ValueError, OSError, MemoryError, IndexError]))
def test_every_exception_has_a_code_and_a_message(text: str, cls: type[Exception]):
    for error in (cls(text), LayerFailed("fc", cls(text)), StepFailed(0, cls(text))):
        failure = classify(error)
        assert failure.detail
        assert failure.as_dict()["rank"] == 0


@given(st.integers(0, 2**50))
def test_a_size_as_people_read_it_is_near_the_truth(num_bytes: int):
    number, unit = memory.size(num_bytes).split()
    factor = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * factor - num_bytes) <= 0.051 * factor + (unit == "bytes")


def ended(directory, job, table):
    from engine.process import rank

    meta_job = write_job(directory, planned(job)["spec"], table)
    rank.main(meta_job)
    return read_frames(directory / "spool", 0, 10**6)[0][-1]["error"]


def test_a_loss_that_fails_is_named_as_the_layer(digits, tmp_path):
    resolved = planned(spec())["spec"]
    resolved["data"]["fields"]["label"]["dim"] = 10
    resolved["network"]["layers"][-1]["args"]["out_features"] = 5
    from engine.process import rank

    rank.main(write_job(tmp_path, resolved, digits))
    error = read_frames(tmp_path / "spool", 0, 10**6)[0][-1]["error"]
    assert (error["code"], error["layer"], error["step"]) == ("data_failed", "loss", 0)
    assert "out of bounds" in error["message"]


def test_bad_numbers_are_blamed_on_the_first_layer_that_made_them(digits, tmp_path):
    job = spec()
    job["network"]["layers"] += [
        {"name": "root", "type": "log", "inputs": ["fc"]},
        {"name": "share", "type": "mul", "inputs": ["root", "root"]},
        {"name": "wish", "type": "sigmoid", "inputs": ["fc"]},
    ]
    job["loss"] = {"type": "BCELoss", "inputs": ["share", "wish"]}
    error = ended(tmp_path, job, digits)
    assert (error["code"], error["category"]) == ("non_finite", "nonfinite")
    assert (error["layer"], error["step"]) == ("root", 0)
    assert "'loss' failed by it" in error["message"]


def test_bad_parameters_are_blamed_before_what_they_put_out(digits, tmp_path):
    job = spec(optimizer={"type": "SGD", "args": {"lr": 1e38, "momentum": 0.9}})
    job["network"]["layers"].append({"name": "p", "type": "sigmoid", "inputs": ["fc"]})
    job["network"]["layers"].append({"name": "wish", "type": "sigmoid", "inputs": ["flat"]})
    job["network"]["layers"].append(
        {"name": "few", "type": "narrow", "args": {"dim": 1, "start": 0, "length": 10}}
    )
    job["loss"] = {"type": "BCELoss", "inputs": ["p", "few"]}
    error = ended(tmp_path, job, digits)
    assert error["category"] == "nonfinite", error
    assert error["hint"].startswith("Lower the learning rate")
    assert error["step"] > 0
    assert error["layer"] in ("conv1", "fc")
