"""Planner: a warm process that answers plans and catalog questions, one JSON line each.

Memory is limited, CPU time is limited, and every exception is an answer. CPU time is used because a
busy machine must not make a network count as larger. A forked child answers each request. The
kernel ends a child that takes too long (SIGPROF), so no code is interrupted midway and the warm
process stays.
"""

import argparse
import contextlib
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Generator, Mapping
from functools import cache
from typing import Any

if __name__ == "__main__":
    gc.disable()  # there is no garbage yet, and looking for it takes a sixth of the import time

import pydantic
import torch

from engine.checkpoint.imported_weights import check_upload
from engine.core.problems import SpecProblems, one
from engine.metrics import epoch_metrics
from engine.plan import catalog
from engine.plan.plan import parse_spec, plan
from engine.process.hardening import check_torch
from engine.training.settable import changed_job, settable
from glasshouse import jsonio
from glasshouse.spec import KINDS, Trained, TrainJob, UploadedNetwork, parse_trained
from glasshouse.spec.error_messages import problems_in
from glasshouse.unpickling import refuse_unpickling

MAX_MEMORY_BYTES = 4 * 2**30
MAX_SECONDS = 10.0


def answer(request: Any) -> dict[str, Any]:
    """Answer one request; never raises."""
    if not isinstance(request, dict):
        return _refused(None, [{"pointer": "", "detail": "not an object", "code": "json"}])
    number = request.get("id")
    warm_up()
    _load(request)
    try:
        if request.get("do") == "catalog":
            entries = catalog.section(str(request["section"]))
            return {"id": number, "ok": True, "entries": entries}
        if request.get("do") == "set":
            return {"id": number, "ok": True, "settable": _check_set(request)}
        if request.get("do") == "upload":
            upload = UploadedNetwork.model_validate_json(json.dumps(request["upload"]))
            return {"id": number, "ok": True, "upload": check_upload(upload, request["tensors"])}
        return {"id": number, "ok": True, "plan": _plan(request)}
    except SpecProblems as found:
        errors = [item.as_dict() for item in found.problems]
    except catalog.UnknownSection as error:
        errors = [{"pointer": "/section", "detail": f"no section {error}", "code": "unknown"}]
    except pydantic.ValidationError as error:
        body = request.get("spec") or request.get("upload")
        roots = KINDS if "spec" in request else (UploadedNetwork,)
        found = problems_in(error.errors(include_url=False), body, *roots)
        errors = [item.as_dict() for item in found]
    except MemoryError:
        detail = "the network is too large to be checked in memory"
        errors = [{"pointer": "/network", "detail": detail, "code": "too_large"}]
    except Exception as error:  # whatever a spec causes in torch is an answer
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        detail = f"the spec cannot be checked: {type(error).__name__}: {reason}"
        errors = [{"pointer": "", "detail": detail, "code": "unchecked"}]
    return _refused(number, errors)


def _load(request: Mapping[str, Any]) -> None:
    """Import what only some requests need, before the time limit starts."""
    for name in ("spec", "network"):  # an evaluation also computes the metrics of training
        if isinstance(spec := request.get(name), dict):
            epoch_metrics.load_for(spec)
    if request.get("do") == "catalog" and request.get("section") == "metrics":
        catalog.section("metrics")


@cache
def warm_up() -> None:
    """Plan one small job, so that everything torch imports at first use is loaded."""
    layers = [
        {"name": "conv", "type": "Conv2d", "args": {"out_channels": 2, "kernel_size": 3}},
        {"name": "norm", "type": "BatchNorm2d"},
        {"name": "act", "type": "ReLU"},
        {"name": "pool", "type": "MaxPool2d", "args": {"kernel_size": 2}},
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
    ]
    fields = {"x": {"type": "dense"}, "y": {"type": "integer", "dim": 2}}
    spec = {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "y"]},
        "optimizer": {"type": "Adam"},
        "data": {"train": {"dataset": "d"}, "fields": fields, "batch_size": 2},
        "stop": {"steps": 1},
        "probes": [{"layers": ["*"], "kinds": ["output_grad"], "every": 1}],
    }
    columns = [
        {"name": "x", "dtype": "float32", "shape": [1, 6, 6], "file": "0.npy"},
        {"name": "y", "dtype": "int64", "shape": [], "file": "1.npy"},
    ]
    plan(parse_spec(spec), {"d": {"columns": columns, "splits": {"all": 4}}})


def _plan(request: dict[str, Any]) -> dict[str, Any]:
    network = request.get("network")
    trained_by = None if network is None else parse_trained(json.dumps(network))
    models: dict[str, Trained] = {}
    for reference, trained in (request.get("models") or {}).items():
        found = parse_trained(json.dumps(trained))
        if found is None:
            raise one(
                "/models", f"{reference!r} is not of a job that trains a network", "no_network"
            )
        models[reference] = found
    return plan(parse_spec(request["spec"]), request.get("datasets", {}), trained_by, models)


def _check_set(request: dict[str, Any]) -> list[str]:
    """Check the requested settings of a running job; return those that can be set."""
    spec = parse_spec(request["spec"])
    if not isinstance(spec, TrainJob):
        raise one("/set", "only the settings of a training job can be changed", "not_trained")
    changed_job(spec, request["set"])
    return settable(spec)


def _refused(number: Any, errors: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": number, "ok": False, "errors": errors}


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """End this process with SIGPROF if this context uses more CPU time than ``seconds``.

    No Python code runs then. An exception from a signal handler may be raised in a destructor or a
    callback of torch, which would abort the process.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(extra_bytes: int) -> None:
    """Limit the address space to its current size plus ``extra_bytes``."""
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if used:  # elsewhere the limit would count libraries that are only mapped
        limit = used + extra_bytes
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Serve requests from standard input until it ends."""
    parser = argparse.ArgumentParser(prog="python -m engine.process.planner")
    parser.add_argument("--max-seconds", type=float, default=MAX_SECONDS)
    parser.add_argument("--max-memory-bytes", type=int, default=MAX_MEMORY_BYTES)
    limits = parser.parse_args()
    check_torch()
    refuse_unpickling()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints must not go into the answers
    catalog.section("layers")
    warm_up()
    limit_memory(limits.max_memory_bytes)
    gc.freeze()
    gc.enable()
    _say(answers, {"ready": True, "torch": torch.__version__.partition("+")[0]})
    for line in sys.stdin:
        try:
            request = json.loads(line)
        except ValueError:
            _say(answers, _refused(None, [{"pointer": "", "detail": "not JSON", "code": "json"}]))
            continue
        seconds = limits.max_seconds
        if isinstance(request, dict):
            _load(request)
            seconds = min(seconds, float(request.get("max_seconds", seconds)))
        _say(answers, answer_in_child(request, seconds))


def answer_in_child(request: Any, max_seconds: float) -> dict[str, Any]:
    """Answer one request in a child of this process.

    If the child uses more CPU time than ``max_seconds``, the answer has ``overtime``. If it dies
    otherwise, the request is refused with the code ``unchecked``.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with time_limit(max_seconds):
                text = jsonio.dumps(answer(request))
            with os.fdopen(writer, "w", encoding="utf-8") as out:
                out.write(text)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as found:
        text = found.read()
    _, status = os.waitpid(child, 0)
    number = request.get("id") if isinstance(request, dict) else None
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        detail = f"the network is too large to be checked within {max_seconds:g} s"
        errors = [{"pointer": "/network", "detail": detail, "code": "too_large"}]
        return _refused(number, errors) | {"overtime": True}
    try:
        return jsonio.loads(text)
    except ValueError:
        detail = "the process that checks it ended before it was done"
        return _refused(number, [{"pointer": "", "detail": detail, "code": "unchecked"}])


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(jsonio.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
