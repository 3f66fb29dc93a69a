"""The messages of the gRPC form of the Open Inference Protocol, as classes of ``protobuf``.

The numbers and types of the fields are those of the published protocol. The classes are in a pool
of descriptors of their own, so that a client's classes of the same names can be in the process.
"""

from importlib import import_module
from typing import Any

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live 1 bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready 1 bool",
    "ModelReadyRequest": "name 1 string, version 2 string",
    "ModelReadyResponse": "ready 1 bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name 1 string, version 2 string, extensions 3 string*",
    "ModelMetadataRequest": "name 1 string, version 2 string",
    "ModelMetadataResponse": "name 1 string, versions 2 string*, platform 3 string, "
    "inputs 4 ModelMetadataResponse.TensorMetadata*, "
    "outputs 5 ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": "name 1 string, datatype 2 string, shape 3 int64*",
    "InferParameter": "bool_param 1 bool?, int64_param 2 int64?, string_param 3 string?, "
    "double_param 4 double?, uint64_param 5 uint64?",
    "InferTensorContents": "bool_contents 1 bool*, int_contents 2 int32*, int64_contents 3 int64*, "
    "uint_contents 4 uint32*, uint64_contents 5 uint64*, fp32_contents 6 float*, "
    "fp64_contents 7 double*, bytes_contents 8 bytes*",
    "ModelInferRequest": "model_name 1 string, model_version 2 string, id 3 string, "
    "parameters 4 map, inputs 5 ModelInferRequest.InferInputTensor*, "
    "outputs 6 ModelInferRequest.InferRequestedOutputTensor*, raw_input_contents 7 bytes*",
    "ModelInferRequest.InferInputTensor": "name 1 string, datatype 2 string, shape 3 int64*, "
    "parameters 4 map, contents 5 InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "name 1 string, parameters 2 map",
    "ModelInferResponse": "model_name 1 string, model_version 2 string, id 3 string, "
    "parameters 4 map, outputs 5 ModelInferResponse.InferOutputTensor*, "
    "raw_output_contents 6 bytes*",
    "ModelInferResponse.InferOutputTensor": "name 1 string, datatype 2 string, shape 3 int64*, "
    "parameters 4 map, contents 5 InferTensorContents",
    "RepositoryIndexRequest": "repository_name 1 string, ready 2 bool",
    "RepositoryIndexResponse": "models 1 RepositoryIndexResponse.ModelIndex*",
    "RepositoryIndexResponse.ModelIndex": "name 1 string, version 2 string, state 3 string, "
    "reason 4 string",
}
"""Fields by message: name, number and type. ``*``: repeated; ``?``: one of these at most; ``map``:
from texts to ``InferParameter``."""
_CHOICE = "parameter_choice"


def message_classes() -> dict[str, Any]:
    """Return the classes of the messages by name.

    Raises:
        ImportError: ``protobuf`` is not installed.
    """
    descriptors = import_module("google.protobuf.descriptor_pb2")
    pool = import_module("google.protobuf.descriptor_pool").DescriptorPool()
    file = descriptors.FileDescriptorProto(
        name="glasshouse/inference.proto", package=PACKAGE, syntax="proto3"
    )
    made: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        made[name] = made[outer].nested_type.add() if outer else file.message_type.add()
        made[name].name = inner
        for text in filter(None, fields.split(", ")):
            _add(made[name], name, text, descriptors.FieldDescriptorProto)
    pool.Add(file)
    class_of = import_module("google.protobuf.message_factory").GetMessageClass
    return {
        name: class_of(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in _MESSAGES
        if "." not in name
    }


def _add(message: Any, path: str, text: str, kinds: Any) -> None:
    """Add a field to the descriptor of a message."""
    name, number, kind = text.split(" ")
    field = message.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
    if kind.endswith("*") or kind == "map":
        field.label = kinds.LABEL_REPEATED
    if kind.endswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name=_CHOICE)
        field.oneof_index = 0
    kind = kind.rstrip("*?")
    if kind == "map":
        entry = message.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        _add(entry, "", "key 1 string", kinds)
        _add(entry, "", "value 2 InferParameter", kinds)
        kind = f"{path}.ParametersEntry"
    if kind[0].isupper():
        field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(kinds, f"TYPE_{kind.upper()}")
