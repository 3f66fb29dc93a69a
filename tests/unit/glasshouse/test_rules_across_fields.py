"""Rules across fields of a spec: an error points at the field and names its value and the fix."""

import ast
import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import TypeAdapter, ValidationError

from glasshouse import spec
from glasshouse.spec.error_locations import place_of, pointer
from glasshouse.spec.error_messages import problems_in
from glasshouse.spec.jobs import JobSpec
from glasshouse.spec.strict import WrongAt
from glasshouse.spec.uploads import UploadedNetwork
from tests.unit.glasshouse.test_error_messages import TRAIN

SPEC = Path(spec.__file__).parent
BODIES: TypeAdapter[Any] = TypeAdapter(JobSpec | UploadedNetwork)
INFER: dict[str, Any] = {"kind": "infer", "checkpoint": "ckpt_1", "data": {"dataset": "ds"}}
EVALUATE: dict[str, Any] = {**INFER, "kind": "evaluate"}
DIAGNOSE: dict[str, Any] = {"kind": "diagnose", "parallel": {"processes": 2}}
SERVE: dict[str, Any] = {"kind": "serve", "models": ["mnist@production"]}
UPLOAD: dict[str, Any] = {
    "kind": "upload",
    "network": {"layers": [{"name": "x", "type": "Linear"}]},
    "fields": {"x": {"type": "dense"}},
}
PROBE = {"layers": ["fc"], "kinds": ["output"]}
ACCURACY = {"type": "accuracy", "inputs": ["fc", "label"]}
PLATEAU = {"type": "ReduceLROnPlateau", "metric": "validation/loss"}
EVALUATED = {"evaluate": {"every_steps": 1}}
TWO = {"processes": 2}
PARTS = {"strategy": "fsdp", "processes": 2}
OFFLOADED = {**PARTS, "cpu_offload": True}
SPARSE_LAYER = {
    "name": "emb",
    "type": "Embedding",
    "args": {"num_embeddings": 5, "embedding_dim": 2, "sparse": True},
}
UNSIZED = {
    **TRAIN,
    "data": {name: value for name, value in TRAIN["data"].items() if name != "batch_size"},
}
FC = {"name": "fc", "type": "Linear"}


class Broken(NamedTuple):
    """A body that breaks one rule: what is changed in it, and what is said."""

    change: dict[str, Any]
    pointer: str
    says: tuple[str, ...]
    """Words of the detail: the field, its value, the fix."""
    body: dict[str, Any] = TRAIN


def merged(body: Any, change: Any) -> Any:
    """A merge patch (RFC 7396), but null is a value, and a preset takes the place of a graph."""
    is_merged = isinstance(body, dict) and isinstance(change, dict) and "preset" not in change
    if not is_merged:
        return change
    found = copy.deepcopy(body)
    for key, value in change.items():
        found[key] = merged(found.get(key), value)
    return found


def data(**more: Any) -> dict[str, Any]:
    return {"data": more}


def field(name: str, **more: Any) -> dict[str, Any]:
    return {"data": {"fields": {name: more}}}


def on_devices(first: int, second: int, **changes: Any) -> dict[str, Any]:
    """Two layers on two devices; ``changes``: of the job, or else of the second layer."""
    of_job = {name: changes.pop(name) for name in ("parallel", "devices") if name in changes}
    layers = [
        {"name": "l0", "type": "Linear", "device": first},
        {"name": "l1", "type": "Linear", "device": second, **changes},
    ]
    two = {"type": "cuda", "count": 2}
    job = {"parallel": {"strategy": "placed"}, "devices": two, **of_job}
    return {"network": {"layers": layers}, **job}


def staged(*stages: int | None, batch: int = 8, **parallel: Any) -> dict[str, Any]:
    """A chain of layers in these stages of a pipeline of two processes; ``parallel``: the rest."""
    chain = [
        {"name": f"l{number}", "type": "Linear"} | ({} if stage is None else {"stage": stage})
        for number, stage in enumerate(stages)
    ]
    both = {"strategy": "pipeline", "processes": 2, **parallel}
    return {"network": {"layers": chain}, "parallel": both, **data(batch_size=batch)}


def changed(body: dict[str, Any], number: int, **more: Any) -> dict[str, Any]:
    """The body with more in one of its layers."""
    body["network"]["layers"][number] |= more
    return body


def augment(kind: str, **args: Any) -> dict[str, Any]:
    return {"data": {"fields": {"x": {"augment": [{"type": kind, "args": args}]}}}}


def augmented(name: str) -> str:
    return f"/data/fields/x/augment/0/args/{name}"


def probe(**more: Any) -> dict[str, Any]:
    return {"probes": [PROBE | more]}


def metric(**more: Any) -> dict[str, Any]:
    return {"metrics": [ACCURACY | more]}


def layers(*found: dict[str, Any]) -> dict[str, Any]:
    return {"network": {"layers": list(found)}}


def preset(name: str, **args: Any) -> dict[str, Any]:
    return {"network": {"type": "preset", "preset": name, "args": args}}


def loss(**more: Any) -> dict[str, Any]:
    return TRAIN["loss"] | more


CASES: dict[str, Broken] = {
    # a job's own fields
    "grad_scaler": Broken(
        {"grad_scaler": {}, "precision": "bfloat16"},
        "/grad_scaler",
        ("grad_scaler", "'bfloat16'", "set precision"),
    ),
    "grad_scaler and the default precision": Broken(
        {"grad_scaler": {}}, "/grad_scaler", ("grad_scaler", "'float32'", "remove")
    ),
    "allocator": Broken(
        {"guards": {"memory": {"allocator": {"expandable_segments": True}}}},
        "/guards/memory/allocator",
        ("allocator", "'auto'", "set devices.type to cuda"),
    ),
    "tune": Broken(
        {"tune": True, "memory_format": "channels_last"},
        "/tune",
        ("tune", "'channels_last'", "remove one"),
    ),
    "two losses of one type": Broken(
        {"loss": [loss(), loss()]},
        "/loss/1/name",
        ("'CrossEntropyLoss'", "give each a unique name"),
    ),
    "two losses of one name": Broken(
        {"loss": [loss(name="a"), loss(name="b"), loss(name="a")]}, "/loss/2/name", ("'a'",)
    ),
    "a layer named like a field": Broken(
        layers(FC, {"name": "label", "type": "ReLU"}), "/network/layers/1", ("'label'", "rename")
    ),
    "a preset's layer named like a field": Broken(
        preset("mlp") | field("fc1", type="dense"), "/network", ("'fc1'", "rename")
    ),
    "evaluate without rows": Broken(
        {"evaluate": {"every_steps": 1}}, "/evaluate", ("data.validation", "remove evaluate")
    ),
    "early without rows": Broken(
        {"stop": {"early": {"metric": "validation/loss", "mode": "min", "patience": 1}}},
        "/stop/early",
        ("stop.early", "validation/loss", "set data.validation and evaluate"),
    ),
    "early without evaluations": Broken(
        {
            "stop": {"early": {"metric": "validation/loss", "mode": "min", "patience": 1}},
            "data": {"validation": {"dataset": "ds"}},
            "evaluate": None,
        },
        "/stop/early",
        ("stop.early", "validation/loss", "set evaluate"),
    ),
    "a source named like a field of a source": Broken(
        {"data": {"validation": {"split": {"dataset": "ds"}}}},
        "/data/validation/split",
        ("'split'", "field of a source", "choose another name"),
    ),
    "a source named like a series": Broken(
        {"data": {"validation": {"loss": {"dataset": "ds"}}}},
        "/data/validation/loss",
        ("'loss'", "validation/loss", "choose another name"),
    ),
    "a scheduler without evaluations": Broken(
        {"scheduler": PLATEAU}, "/scheduler/metric", ("scheduler.metric", "validation/loss", "set")
    ),
    # devices
    "count": Broken({"devices": {"count": 1}}, "/devices/count", ("count", "'auto'", "cuda")),
    "ids": Broken({"devices": {"type": "cpu", "ids": [0]}}, "/devices/ids", ("ids", "'cpu'")),
    "threads": Broken(
        {"devices": {"threads": 2}},
        "/devices/threads",
        ("threads", "'auto'", "set type to cpu or cuda"),
    ),
    "count and ids": Broken(
        {"devices": {"type": "cuda", "count": 1, "ids": [0]}},
        "/devices/ids",
        ("only one of count, ids", "count (1)"),
    ),
    "a device twice": Broken(
        {"devices": {"type": "cuda", "ids": [2, 2]}, "parallel": TWO},
        "/devices/ids/1",
        ("device 2", "once"),
    ),
    "several devices for one process": Broken(
        {"devices": {"type": "cuda", "ids": [2, 3]}},
        "/devices/ids",
        ("2 devices", "parallel.strategy"),
    ),
    "a number of devices for one process": Broken(
        {"devices": {"type": "cuda", "count": 2}}, "/devices/count", ("2 devices", "one device")
    ),
    "several devices for an inference": Broken(
        {"devices": {"type": "cuda", "count": 2}},
        "/devices/count",
        ("2 devices", "parallel.strategy to data", "one device"),
        INFER,
    ),
    "the size of a field that an inference does not return": Broken(
        {"fields": ["id"], "top_k": 3}, "/top_k", ("top_k (3)", 'add "top_k" to fields'), INFER
    ),
    "rows of all layers below each other in a table": Broken(
        {"format": "jsonl", "flatten": {"axis": 0}},
        "/flatten/axis",
        ("jsonl", "axis 0", "set format to safetensors"),
        INFER,
    ),
    "joined layers in a table": Broken(
        {"format": "parquet", "flatten": {"axis": 1}},
        "/flatten",
        ("parquet", "beside each other anyway", "remove flatten"),
        INFER,
    ),
    "packed rows in a table": Broken(
        {"format": "csv", "sequence_layout": "packed"},
        "/sequence_layout",
        ("csv", "packed would change nothing", "remove sequence_layout"),
        INFER,
    ),
    "an inference that divides the network": Broken(
        {"parallel": {"fsdp": 2}}, "/parallel", ("fsdp", "set strategy to data"), INFER
    ),
    "a pipeline's option of an inference": Broken(
        {"parallel": {"processes": 2, "micro_batches": 4}},
        "/parallel/micro_batches",
        ("micro_batches (4)", "remove micro_batches"),
        INFER,
    ),
    "processes that divide inputs": Broken(
        {"data": None, "inputs": {"x": [[1.0]]}, "parallel": {"processes": 2}},
        "/parallel/processes",
        ("2 processes", "in inputs", "remove parallel"),
        INFER,
    ),
    # several processes
    "none, and several": Broken(
        {"parallel": {"strategy": "none", "processes": 2}},
        "/parallel/processes",
        ("none", "2", "set strategy to data"),
    ),
    "how many processes": Broken(
        {"parallel": {"strategy": "data"}}, "/parallel/processes", ("missing", "set")
    ),
    "processes and devices": Broken(
        {"devices": {"type": "cuda", "count": 3}, "parallel": TWO},
        "/parallel/processes",
        ("2 processes", "asks for 3", "same number"),
    ),
    "no batch size": Broken({}, "/data/batch_size", ("missing", "global_batch_size"), UNSIZED),
    "rows that cannot be divided": Broken(
        {"parallel": TWO, **data(global_batch_size=65)},
        "/data/global_batch_size",
        ("65", "2 processes", "multiple of 2"),
    ),
    "two batch sizes": Broken(
        {"parallel": TWO, **data(batch_size=8, global_batch_size=64)},
        "/data/batch_size",
        ("8", "64", "remove one"),
    ),
    "sizes and strategy": Broken(
        {"parallel": {"strategy": "data", "data": 2, "fsdp": 2}},
        "/parallel/strategy",
        ("data 2 and fsdp 2", "remove strategy"),
    ),
    "sizes and processes": Broken(
        {"parallel": {"data": 2, "fsdp": 2, "processes": 3}},
        "/parallel/processes",
        ("data 2 and fsdp 2 make 4", "processes is 3", "remove processes"),
    ),
    "shards of float16": Broken(
        {"parallel": PARTS, "precision": "float16"}, "/precision", ("float16", "set bfloat16")
    ),
    "shards and a sparse optimizer": Broken(
        {"parallel": PARTS, "optimizer": {"type": "SGD", "sparse": {"type": "SparseAdam"}}},
        "/optimizer/sparse",
        ("fsdp", "remove sparse"),
    ),
    "shards and sparse gradients": Broken(
        {"parallel": PARTS, "network": {"layers": [SPARSE_LAYER]}},
        "/network/layers/0/args/sparse",
        ("'emb'", "remove sparse"),
    ),
    "tune with processes": Broken(
        {"parallel": TWO, "tune": True}, "/tune", ("one process", "asks for 2", "remove tune")
    ),
    "tokens with processes": Broken(
        {"parallel": TWO, **data(bucket_by_length={"max_tokens": 64})},
        "/data/bucket_by_length/max_tokens",
        ("64", "one process", "remove"),
    ),
    "state with processes": Broken(
        {
            "parallel": TWO,
            "network": {"layers": [{"name": "fc", "type": "LSTM", "stateful": True}]},
        },
        "/network/layers/0/stateful",
        ("'fc'", "one process", "remove stateful"),
    ),
    # layers on several devices
    "a device without the strategy": Broken(
        {"network": {"layers": [{"name": "fc", "type": "Linear", "device": 0}]}},
        "/network/layers/0/device",
        ("'fc'", "it is none", "remove device", "set the strategy to placed"),
    ),
    "a device that the job does not have": Broken(
        on_devices(0, 2, devices={"type": "cuda", "ids": [4, 5]}),
        "/network/layers/1/device",
        ("device 2", "'l1'", "the job's 2 devices", "below 2"),
    ),
    "layers on CPU cores": Broken(
        on_devices(0, 1, devices={"type": "cpu"}),
        "/devices/type",
        ("'cpu'", '"count": 2', "one device for torch"),
    ),
    "layers on any devices": Broken(
        on_devices(0, 1, devices={"type": "auto"}), "/devices/type", ("'auto'", '"count": 2')
    ),
    "layers on an unknown number of devices": Broken(
        on_devices(0, 2, devices={"type": "cuda"}), "/devices/count", ("set count to 3",)
    ),
    "layers of several processes": Broken(
        on_devices(0, 1, parallel={"strategy": "placed", "processes": 2}),
        "/parallel/processes",
        ("placed", "2", "remove processes"),
    ),
    "layers and sizes": Broken(
        on_devices(0, 1, parallel={"strategy": "placed", "data": 2}),
        "/parallel/strategy",
        ("placed", "data 2", "remove strategy"),
    ),
    "shared parameters on two devices": Broken(
        on_devices(0, 1, shared_with="l0"),
        "/network/layers/1/device",
        ("'l1'", "'l0'", "device 0", "set it to 0"),
    ),
    "a change of another device's output": Broken(
        on_devices(0, 1, type="ReLU", args={"inplace": True}),
        "/network/layers/1/args/inplace",
        ("'l1'", "'l0'", "device 0", "remove inplace"),
    ),
    # pipelines
    "a stage without a pipeline": Broken(
        {"network": {"layers": [FC | {"stage": 0}]}},
        "/network/layers/0/stage",
        ("stage 0", "'fc'", "strategy is none", "remove stage", "pipeline"),
    ),
    "a stage of one process": Broken(
        staged(0, 0, processes=1),
        "/network/layers/0/stage",
        ("stage 0", "'l0'", "processes is 1", "at least 2 processes"),
    ),
    "a schedule without a pipeline": Broken(
        {"parallel": {"processes": 2, "schedule": "gpipe"}},
        "/parallel/schedule",
        ("schedule (gpipe)", "strategy is data", "remove schedule"),
    ),
    "micro-batches without a pipeline": Broken(
        {"parallel": {"strategy": "fsdp", "processes": 2, "micro_batches": 4}},
        "/parallel/micro_batches",
        ("micro_batches (4)", "strategy is fsdp", "remove micro_batches"),
    ),
    "micro-batches of a strategy that is not chosen": Broken(
        {"parallel": {"strategy": "auto", "processes": 2, "micro_batches": 4}},
        "/parallel/micro_batches",
        ("strategy is auto",),
    ),
    "a schedule of a diagnosis": Broken(
        {"parallel": {"strategy": "pipeline", "schedule": "gpipe"}},
        "/parallel/schedule",
        ("schedule (gpipe)", "diagnose", "remove schedule"),
        DIAGNOSE,
    ),
    "offloading of a diagnosis": Broken(
        {"parallel": {"strategy": "fsdp", "cpu_offload": True}, "devices": {"type": "cuda"}},
        "/parallel/cpu_offload",
        ("cpu_offload (true)", "diagnose", "remove cpu_offload"),
        DIAGNOSE,
    ),
    "offloading on CPU cores": Broken(
        {"parallel": OFFLOADED, "devices": {"type": "cpu"}},
        "/parallel/cpu_offload",
        (
            "cpu_offload (true)",
            "devices.type is cpu",
            "set the type to cuda",
            "host memory already",
        ),
    ),
    "offloading on whatever there is": Broken(
        {"parallel": OFFLOADED},
        "/parallel/cpu_offload",
        ("cpu_offload (true)", "devices.type is auto", "set the type to cuda", "may run on CPU"),
    ),
    **{
        f"offloading with the strategy {name}": Broken(
            {"parallel": {**OFFLOADED, "strategy": name}, "devices": {"type": "cuda"}},
            "/parallel/cpu_offload",
            ("cpu_offload (true)", f"strategy is {name}", "set it to fsdp", "remove cpu_offload"),
        )
        for name in ("data", "tensor", "pipeline", "auto")
    },
    **{
        f"offloading with {sizes}": Broken(
            {"parallel": {"cpu_offload": True, **sizes}, "devices": {"type": "cuda"}},
            "/parallel/cpu_offload",
            ("cpu_offload (true)", says, "remove cpu_offload"),
        )
        for sizes, says in (
            ({"data": 2, "tensor": 2}, "strategy is tensor"),
            ({"fsdp": 2, "pipeline": 2}, "cannot be combined with pipeline yet"),
            ({"data": 2, "fsdp": 1}, "set it to at least 2"),
            ({"strategy": "fsdp", "processes": 1}, "set it to at least 2"),
            ({"strategy": "none"}, "strategy is none"),
        )
    },
    "tensor and pipeline": Broken(
        staged(None, None, strategy="pipeline", processes=None, tensor=2, pipeline=2),
        "/parallel/tensor",
        ("tensor cannot be combined with pipeline yet", "tensor is 2", "with data"),
    ),
    "batch normalization over all processes of a pipeline": Broken(
        changed(staged(None, None), 0, type="SyncBatchNorm"),
        "/network/layers/0/type",
        ("SyncBatchNorm", "pipeline", "BatchNorm"),
    ),
    "a flight recorder of a pipeline": Broken(
        staged(None, None) | probe(on="nonfinite"),
        "/probes/0/on",
        ("on (nonfinite)", "set every or at"),
    ),
    "micro-batches of unequal size": Broken(
        staged(None, None, micro_batches=3),
        "/parallel/micro_batches",
        ("micro_batches is 3", "8 rows", "a divisor of 8", "multiple of 3"),
    ),
    "too few micro-batches": Broken(
        staged(None, None, micro_batches=1),
        "/parallel/micro_batches",
        ("2 processes", "at least 2", "schedule 1f1b", "gpipe"),
    ),
    "too few interleaved micro-batches": Broken(
        staged(None, None, micro_batches=1, schedule="interleaved"),
        "/parallel/micro_batches",
        ("at least 2", "schedule interleaved"),
    ),
    "a batch that makes too few micro-batches": Broken(
        staged(None, None, batch=13),
        "/data/batch_size",
        ("2 processes", "13 rows", "divided into 1", "a multiple of 2", "gpipe"),
    ),
    "rounds of unequal size": Broken(
        staged(None, None, batch=35, micro_batches=7, schedule="interleaved"),
        "/parallel/micro_batches",
        ("7 micro-batches", "3 rounds", "a multiple of 2"),
    ),
    "a stage that is not there": Broken(
        staged(0, 1, 2),
        "/network/layers/2/stage",
        ("stage 2", "'l2'", "2 stages", "below 2", "interleaved"),
    ),
    "interleaved stages that processes cannot share": Broken(
        staged(0, 1, 2, 3, 4, schedule="interleaved"),
        "/network/layers/4/stage",
        ("stage 4", "'l4'", "5 stages", "2 processes", "at least 4"),
    ),
    "an interleaved stage for each process": Broken(
        staged(0, 1, schedule="interleaved"),
        "/network/layers/1/stage",
        ("2 stages", "at least 4", "1f1b"),
    ),
    "a stage without a layer": Broken(
        staged(1, 1), "/network/layers", ("stage 0 has no layer", "2 stages", "fewer processes")
    ),
    "a layer before what it reads": Broken(
        staged(1, 0),
        "/network/layers/1/stage",
        ("'l1' in stage 0", "'l0' in stage 1", "at least 1"),
    ),
    "a layer before its lengths": Broken(
        changed(staged(0, 1, 0, None), 2, inputs=["l0"], lengths="l1"),
        "/network/layers/2/stage",
        ("'l2' in stage 0", "'l1' in stage 1"),
    ),
    "a diagnosis of one process": Broken(
        {"parallel": {"strategy": "placed", "processes": None}},
        "/parallel/strategy",
        ("placed", "one process", "set data"),
        DIAGNOSE,
    ),
    # a diagnosis
    "no message": Broken({"sizes_bytes": [4, 0]}, "/sizes_bytes/1", ("0", "4 to"), DIAGNOSE),
    "a message of half a value": Broken(
        {"sizes_bytes": [1022]}, "/sizes_bytes/0", ("1022", "multiple of 4", "1020"), DIAGNOSE
    ),
    "a size twice": Broken(
        {"sizes_bytes": [8, 4, 8]},
        "/sizes_bytes/2",
        ("8", "twice", "list each size once"),
        DIAGNOSE,
    ),
    "processes to diagnose without a number": Broken(
        {"parallel": {"processes": None}},
        "/parallel/processes",
        ("set parallel.processes",),
        DIAGNOSE,
    ),
    # a service of models
    "a model twice": Broken(
        {"models": ["mnist", "mnist:1", "mnist"]},
        "/models/2",
        ("'mnist'", "twice", "list each model once"),
        SERVE,
    ),
    "a canary of another model": Broken(
        {"models": [{"model": "mnist", "canary": {"model": "digits:2", "share": 0.5}}]},
        "/models/0/canary/model",
        ("'digits:2'", "'mnist'", "another version"),
        SERVE,
    ),
    "a shadow of another model": Broken(
        {"models": ["a", {"model": "b@x", "shadow": {"model": "a", "share": 1}}]},
        "/models/1/shadow/model",
        ("'a'", "'b@x'", "another version of 'b'"),
        SERVE,
    ),
    "a service on two devices": Broken(
        {"devices": {"type": "cuda", "count": 2}},
        "/devices/count",
        ("2 devices", "each replica", "ask for one"),
        SERVE,
    ),
    "a service with an end": Broken(
        {"timeout_s": 60}, "/timeout_s", ("timeout_s (60)", "remove it"), SERVE
    ),
    "fewer replicas than the fewest": Broken(
        {"replicas": {"min": 2, "max": 1}},
        "/replicas/min",
        ("min (2)", "max (1)", "set max to at least 2"),
        SERVE,
    ),
    "idle replicas that stay": Broken(
        {"idle_s": 60},
        "/idle_s",
        ("idle_s (60)", "set replicas.min below max", "remove idle_s"),
        SERVE,
    ),
    "a watched layer twice": Broken(
        {"drift": {"layers": ["fc", "conv*", "fc"]}},
        "/drift/layers/2",
        ("'fc'", "twice", "remove one"),
        SERVE,
    ),
    "a request larger than the log": Broken(
        {"request_log": {"max_bytes": 8192, "max_request_bytes": 2049}},
        "/request_log/max_request_bytes",
        ("max_request_bytes (2049)", "max_bytes (8192)", "at most 2048", "raise max_bytes"),
        SERVE,
    ),
    "redacted twice": Broken(
        {"request_log": {"redact": ["name", "age", "name"]}},
        "/request_log/redact/2",
        ("'name'", "twice", "remove one"),
        SERVE,
    ),
    "redacted of nothing": Broken(
        {"request_log": {"redact": ["name"], "inputs": False, "outputs": False}},
        "/request_log/redact",
        ("neither inputs nor outputs", "remove redact"),
        SERVE,
    ),
    # an inference
    "neither checkpoint nor job": Broken(
        {"checkpoint": None}, "/checkpoint", ("exactly one of checkpoint, job", "none"), INFER
    ),
    "checkpoint and job": Broken(
        {"job": "job_1"}, "/job", ("only one of checkpoint, job", "'ckpt_1'", "'job_1'"), INFER
    ),
    "neither data nor inputs": Broken(
        {"data": None}, "/data", ("exactly one of data, inputs", "none"), INFER
    ),
    "data and inputs": Broken(
        {"inputs": {"x": [[1]]}}, "/inputs", ("only one of data, inputs",), INFER
    ),
    # an evaluation
    "a checkpoint and a job to evaluate": Broken(
        {"job": "job_1"}, "/job", ("only one of checkpoint, job", "'job_1'"), EVALUATE
    ),
    "several devices for an evaluation": Broken(
        {"devices": {"type": "cuda", "count": 2}},
        "/devices/count",
        ("2 devices", "one process", "ask for one"),
        EVALUATE,
    ),
    "a metric of training batches": Broken(
        {"metrics": [{"type": "l2", "inputs": ["fc"]}]},
        "/metrics/0/type",
        ("l2", "name accuracy"),
        EVALUATE,
    ),
    "an interval of an evaluation": Broken(
        {"metrics": [{**ACCURACY, "every": 3}]},
        "/metrics/0/every",
        ("every (3)", "remove every"),
        EVALUATE,
    ),
    "the number of what is not wanted": Broken(
        {"want": ["confusion"], "worst": 3},
        "/worst",
        ("worst (3)", "worst_samples", "remove worst"),
        EVALUATE,
    ),
    "wanted twice": Broken(
        {"want": ["confusion", "confusion"]},
        "/want/1",
        ("'confusion'", "twice", "once"),
        EVALUATE,
    ),
    "a fraction to evaluate": Broken(
        {"data": {"fraction": [0.8, 0.2]}}, "/data/fraction", ("[0.8, 0.2]", "from < to"), EVALUATE
    ),
    # an uploaded network
    "an uploaded layer named like a field": Broken(
        {}, "/network/layers/0", ("'x'", "rename"), UPLOAD
    ),
    # training
    "missing": Broken(
        {"init": {"checkpoint": "c", "load": "all", "missing": "zero"}},
        "/init/missing",
        ("missing 'zero'", "'all'", "remove missing"),
    ),
    "a plateau without a metric": Broken(
        {"scheduler": {"type": "ReduceLROnPlateau"}}, "/scheduler/metric", ("metric", "set it")
    ),
    "a metric without a plateau": Broken(
        {"scheduler": {"type": "StepLR", "metric": "validation/loss"}},
        "/scheduler/metric",
        ("metric 'validation/loss'", "'StepLR'", "remove metric"),
    ),
    "a plateau with a unit": Broken(
        {"scheduler": PLATEAU | {"unit": "epochs"}},
        "/scheduler/unit",
        ("unit ('epochs')", "remove"),
    ),
    "decay": Broken(
        {"average": {"type": "swa", "decay": 0.9}},
        "/average/decay",
        ("decay (0.9)", "'swa'", "remove decay"),
    ),
    "average_window_rate": Broken(
        {"average": {"type": "ema", "average_window_rate": 0.5}},
        "/average/average_window_rate",
        ("average_window_rate (0.5)", "'ema'", "remove"),
    ),
    "max_average_window": Broken(
        {"average": {"type": "ema", "max_average_window": 5}},
        "/average/max_average_window",
        ("max_average_window (5)",),
    ),
    "a window without room": Broken(
        {"average": {"type": "window", "min_average_window": 5, "max_average_window": 4}},
        "/average/min_average_window",
        ("min_average_window (5)", "max_average_window (4)"),
    ),
    "a window without room by default": Broken(
        {"average": {"type": "window", "max_average_window": 4}},
        "/average/max_average_window",
        ("min_average_window (10000)", "max_average_window (4)"),
    ),
    "no end": Broken({"stop": {"steps": None}}, "/stop/epochs", ("exactly one of", "none")),
    "two ends": Broken(
        {"stop": {"seconds": 3}}, "/stop/seconds", ("only one of", "steps (1) and seconds (3.0)")
    ),
    "never evaluated": Broken(
        {"evaluate": {}}, "/evaluate/every_epochs", ("exactly one of", "none")
    ),
    "evaluated twice": Broken(
        {"evaluate": {"every_steps": 1, "every_epochs": 2}},
        "/evaluate/every_steps",
        ("only one of", "every_epochs (2)"),
    ),
    "two intervals of checkpoints": Broken(
        {"checkpoint": {"every_steps": 1, "every_epochs": 2}},
        "/checkpoint/every_steps",
        ("only one of", "every_steps (1)"),
    ),
    # data
    "fraction": Broken(
        {"data": {"train": {"fraction": [0.5, 0.1]}}},
        "/data/train/fraction",
        ("fraction", "[0.5, 0.1]", "from < to"),
    ),
    "fraction of one of several": Broken(
        {"data": {"train": [{"dataset": "a"}, {"dataset": "b", "fraction": [0, 2]}]}},
        "/data/train/1/fraction",
        ("fraction", "[0.0, 2.0]"),
    ),
    "column and columns": Broken(
        field("x", column="a", columns=["b"]),
        "/data/fields/x/columns",
        ("only one of column, columns", "column ('a')"),
    ),
    "classes of two types": Broken(
        field("label", classes=[1, "a"]), "/data/fields/label/classes/1", ("1 and 'a'", "texts")
    ),
    "a class twice": Broken(
        field("label", classes=["a", "b", "a"]),
        "/data/fields/label/classes/2",
        ("'a'", "remove one"),
    ),
    "dim": Broken(
        field("label", classes=["a", "b"], dim=3),
        "/data/fields/label/dim",
        ("dim is 3", "2", "remove dim"),
    ),
    "vocabulary": Broken(
        field("t", type="integer_sequence", vocabulary={}),
        "/data/fields/t/vocabulary",
        ("vocabulary needs tokens", "set tokens"),
    ),
    "a vocabulary with a size": Broken(
        field(
            "t", type="integer_sequence", tokens="words", vocabulary={"given": ["a"], "max_size": 2}
        ),
        "/data/fields/t/vocabulary/max_size",
        ("max_size (2)", "remove"),
    ),
    "a vocabulary with a count": Broken(
        data(
            windows={
                "type": "cbow",
                "tokens": "words",
                "vocabulary": {"given": ["a"], "min_count": 2},
            }
        ),
        "/data/windows/vocabulary/min_count",
        ("min_count (2)", "remove"),
    ),
    "a token twice": Broken(
        field("t", type="integer_sequence", tokens="words", vocabulary={"given": ["a", "a"]}),
        "/data/fields/t/vocabulary/given/1",
        ("'a'", "remove one"),
    ),
    "overflow": Broken(
        data(sequence={"overflow": "drop"}),
        "/data/sequence/overflow",
        ("'drop'", "max_length", "set"),
    ),
    "drop_last": Broken(
        data(drop_last=True, bucket_by_length={"max_tokens": 9}),
        "/data/drop_last",
        ("drop_last (true)", "max_tokens (9)", "remove one"),
    ),
    # random changes of images
    "degrees": Broken(
        augment("RandomRotation", degrees=[2, 1]), augmented("degrees"), ("degrees", "2.0", "swap")
    ),
    "scale": Broken(
        augment("RandomAffine", degrees=0, scale=[2, 1]), augmented("scale"), ("scale", "2.0")
    ),
    "shear along y": Broken(
        augment("RandomAffine", degrees=0, shear=[0, 1, 3, 2]), augmented("shear"), ("shear", "3.0")
    ),
    "ratio": Broken(augment("RandomErasing", ratio=[2, 1]), augmented("ratio"), ("ratio", "2.0")),
    "hue": Broken(augment("ColorJitter", hue=[0.2, 0.1]), augmented("hue"), ("hue", "0.2")),
    "a jitter of nothing": Broken(
        augment("ColorJitter", contrast=0), augmented("contrast"), ("all 0", "set at least one")
    ),
    # guards and clipping
    "max_skipped": Broken(
        {"guards": {"nonfinite": {"max_skipped": 3}}},
        "/guards/nonfinite/max_skipped",
        ("max_skipped (3)", "'warn'", "remove max_skipped"),
    ),
    "parameters of a skipped step": Broken(
        {"guards": {"nonfinite": {"action": "skip_step", "check": ["loss", "parameters"]}}},
        "/guards/nonfinite/check/1",
        ("parameters", "skip_step", "set action"),
    ),
    "no check": Broken(
        {"guards": {"nonfinite": {"action": "skip_step", "check": []}}},
        "/guards/nonfinite/check",
        ("check is []", "add gradients"),
    ),
    "an empty allocator": Broken(
        {"guards": {"memory": {"allocator": {}}}},
        "/guards/memory/allocator",
        ("allocator is {}", "expandable_segments"),
    ),
    "min of a norm": Broken(
        {"grad_clip": {"type": "norm", "max": 1, "min": -1}},
        "/grad_clip/min",
        ("min (-1.0)", "remove min"),
    ),
    "min of a layer's norm": Broken(
        layers(FC | {"grad_clip": {"type": "norm", "max": 1, "min": -1}}),
        "/network/layers/0/grad_clip/min",
        ("min (-1.0)",),
    ),
    "an output's gradient cut": Broken(
        layers(FC | {"output_grad_clip": {"min": 0, "max": 0}}),
        "/network/layers/0/output_grad_clip/max",
        ("both 0", "set stop_gradient"),
    ),
    # metrics
    "inputs": Broken(
        metric(inputs=["fc"]), "/metrics/0/inputs", ("accuracy takes 2 inputs", "got 1")
    ),
    "top_k": Broken(
        metric(type="mean_abs_diff", top_k=3), "/metrics/0/top_k", ("top_k (3)", "'mean_abs_diff'")
    ),
    "args": Broken(metric(args={"a": 1}), "/metrics/0/args", ("'accuracy'", "remove args")),
    "a kind that is not compared": Broken(
        metric(inputs=["fc", "fc/update"]), "/metrics/0/inputs/1", ("'fc/update'", "name a layer")
    ),
    "a reserved name": Broken(metric(name="time/x"), "/metrics/0/name", ("'time/x'", "choose")),
    # networks
    "two layers of one name": Broken(layers(FC, FC), "/network/layers/1", ("'fc'", "rename")),
    "shared with nothing": Broken(
        layers(FC, {"name": "b", "shared_with": "c"}),
        "/network/layers/1/shared_with",
        ("'b'", "must name"),
    ),
    "shared with other args": Broken(
        layers(FC, {"name": "b", "shared_with": "fc", "args": {"bias": False}}),
        "/network/layers/1",
        ("'b'", "omit type and args"),
    ),
    "shared with another option": Broken(
        layers(FC, {"name": "b", "shared_with": "fc", "trainable": False}),
        "/network/layers/1/trainable",
        ("'b'", "set trainable there"),
    ),
    "a jitter without arguments": Broken(
        augment("ColorJitter"), augmented("brightness"), ("all 0",)
    ),
    "heads of a language model": Broken(
        preset("transformer_lm", num_heads=5),
        "/network/args/width",
        ("width (384)", "num_heads (5)"),
    ),
    "heads of a classifier": Broken(
        preset("transformer_classifier", width=6),
        "/network/args/width",
        ("width (6)", "num_heads (4)"),
    ),
    # probes
    "no time to look": Broken(probe(), "/probes/0/every", ("exactly one of every, at, on",)),
    "two times to look": Broken(
        probe(every=2, at=[1]), "/probes/0/at", ("only one of", "every (2)")
    ),
    "stop": Broken(
        probe(every=1, start=5, stop=4), "/probes/0/stop", ("stop (4)", "greater than start (5)")
    ),
    "on while evaluating": Broken(
        probe(on="nonfinite", phase="evaluate"), "/probes/0/phase", ("'evaluate'", "remove phase")
    ),
    "on without stats": Broken(
        probe(on="nonfinite", want=["full"]), "/probes/0/want", ("['full']", "add stats")
    ),
    "on with a histogram": Broken(
        probe(on="nonfinite", want=["stats", "histogram"]),
        "/probes/0/want/1",
        ("remove histogram",),
    ),
    "max_overhead": Broken(
        probe(at=[1], max_overhead=0.5),
        "/probes/0/max_overhead",
        ("max_overhead (0.5)", "remove max_overhead"),
    ),
    "max_overhead without loss": Broken(
        probe(every=1, lossless=True, want=["full"], max_overhead=0.5),
        "/probes/0/max_overhead",
        ("max_overhead (0.5)", "lossless", "remove one"),
    ),
    "no rank at all": Broken(
        probe(every=1, ranks=[]), "/probes/0/ranks", ("empty", 'set ranks to "merged" or "all"')
    ),
    "a rank twice": Broken(
        probe(every=1, ranks=[2, 2]), "/probes/0/ranks/1", ("rank 2", "remove one of them")
    ),
    "ranks of a recorder": Broken(
        probe(on="nonfinite", ranks="all"),
        "/probes/0/ranks",
        ("'all'", "remove ranks, or set every"),
    ),
    "ranks of one process": Broken(
        probe(every=1, ranks=[0]),
        "/probes/0/ranks",
        ("[0]", "one process", "remove ranks, or set parallel.processes"),
    ),
    "a rank that the job does not have": Broken(
        {**probe(every=1, ranks=[1, 2]), "parallel": TWO},
        "/probes/0/ranks/1",
        ("no rank 2", "2 processes", "ranks 0 to 1"),
    ),
    "slice": Broken(probe(every=1, slice="0:1"), "/probes/0/slice", ("slice", "add full to want")),
    "max_bytes": Broken(
        probe(every=1, max_bytes=9), "/probes/0/max_bytes", ("max_bytes (9)", "remove max_bytes")
    ),
    "lossless": Broken(
        probe(every=1, lossless=True), "/probes/0/lossless", ("lossless (true)", "remove lossless")
    ),
}


def broken(case: Broken) -> tuple[dict[str, Any], ValidationError]:
    body = merged(case.body, case.change)
    with pytest.raises(ValidationError) as caught:
        BODIES.validate_json(json.dumps(body))
    return body, caught.value


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_broken_rule_names_field_value_and_fix(case: Broken):
    body = merged(case.body, case.change)
    models: dict[str, Any] = {
        "train": spec.TrainJob,
        "infer": spec.InferJob,
        "diagnose": spec.DiagnoseJob,
    }
    models |= {"evaluate": spec.EvaluateJob, "serve": spec.ServeJob, "upload": UploadedNetwork}
    model = models[body["kind"]]
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body))
    (problem,) = problems_in(caught.value.errors(include_url=False), body, model)
    assert problem.pointer == case.pointer, problem
    assert [word for word in case.says if word not in problem.detail] == [], problem.detail


def test_the_bodies_are_right_without_the_change():
    for body in (TRAIN, INFER, EVALUATE, DIAGNOSE, SERVE):
        BODIES.validate_json(json.dumps(body))


def test_every_rule_is_broken_by_an_example():
    """Each place in the source that raises for a rule is reached by one of the cases."""
    reached: set[tuple[str, int]] = set()
    for case in CASES.values():
        for entry in broken(case)[1].errors():
            trace = entry.get("ctx", {}).get("error", Exception()).__traceback__
            while trace is not None:
                reached.add((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
                trace = trace.tb_next
    for path, node in raised():
        if named(node) in ("WrongAt", "_never_computed"):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            assert any((str(path), line) in reached for line in lines), f"{path}:{node.lineno}"


def test_no_rule_points_at_the_whole():
    """What reads one value may raise a plain ``ValueError``: pydantic knows its field."""
    of_one_value = {"size_of", "_check_known", "_reject_nonfinite"}
    of_one_value |= {"check_model_name", "check_alias", "_check_reference"}
    for path in SPEC.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name in of_one_value:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Raise):
                    assert named(node) != "ValueError", f"{path.name}:{node.lineno}"


def raised() -> list[tuple[Path, ast.Raise]]:
    return [
        (path, node)
        for path in SPEC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
    ]


def named(node: ast.Raise) -> str:
    """What is called in a statement ``raise``."""
    called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def test_a_rule_of_a_field_that_is_omitted_points_where_it_would_be():
    def place(body: Any, *path: int | str) -> str:
        entry = {"type": "value_error", "loc": ("a",), "ctx": {"error": WrongAt(*path, detail="")}}
        return pointer(place_of(entry, body))

    assert place({"a": {}}, "b") == "/a/b"
    assert place({"a": {"b": {}}}, "b", "c") == "/a/b/c"
    assert place({"a": {}}, "b", "c") == "/a"
    assert place({"a": {"b": []}}, "b", 3) == "/a/b"
    assert place({"a": None}, "b") == "/a"
