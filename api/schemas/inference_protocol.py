"""The documents of the Open Inference Protocol, for the OpenAPI description.

Replicas read requests and write responses and the metadata of models.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel

from api.schemas.documents import Document


class ServerMetadata(Document):
    """What the server is."""

    name: str
    version: str
    extensions: list[str]
    """Triton's names of the extensions that are supported."""


class ServerLive(Document):
    """The server is alive."""

    live: bool


class ServerReady(Document):
    """The server is ready."""

    ready: bool


class ModelReady(Document):
    """A model that answers requests."""

    name: str
    ready: bool


class TensorMetadata(Document):
    """A tensor that a model reads or returns."""

    name: str
    """An input: a field of the network. An output: `<layer>/<field>`, such as `fc/prob`."""
    datatype: str
    """Such as `FP32` or `BYTES`."""
    shape: list[int]
    """-1: any size, such as of the rows."""


class InferenceModelMetadata(Document):
    """What a served model reads and returns."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class InferenceTensor(Document):
    """An output."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    """The values, row by row. Absent if they follow the JSON as bytes."""
    parameters: dict[str, Any] | None = None
    """`binary_data_size`: the number of bytes that follow the JSON."""


class InferenceResponse(BaseModel):
    """What a model computed. With binary outputs their bytes follow this JSON."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    model_name: str
    model_version: str
    id: str | None = None
    """That of the request."""
    parameters: dict[str, Any] | None = None
    """`non_finite`: the outputs with NaN or Infinity, if there are any."""
    outputs: list[InferenceTensor]


class IndexEntry(BaseModel):
    """A model of a serve job."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    version: str | None = None
    """Absent if it is not known, because no replica runs."""
    state: Literal["READY", "UNAVAILABLE"]
    reason: str | None = None
    """Why the model is unavailable."""


class ModelIndex(RootModel[list[IndexEntry]]):
    """The models of all serve jobs."""


_JSON_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "schema": {"type": "integer", "minimum": 0, "title": "Inference-Header-Content-Length"},
    "description": "The number of bytes of the JSON, if bytes of tensors follow it.",
}
_CODING = {
    "name": "Content-Encoding",
    "in": "header",
    "schema": {"type": "string", "enum": ["gzip", "deflate"], "title": "Content-Encoding"},
    "description": "The coding of the body. Default: none.",
}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "binary_data_output": {
            "type": "boolean",
            "description": "Return outputs as bytes, unless their `binary_data` is false.",
        },
        "top_k": {"type": "integer", "minimum": 1, "description": "The size of `<layer>/top_k`."},
        "priority": {
            "type": "integer",
            "minimum": 0,
            "maximum": 2000,
            "description": "1 is computed first. 0: as 1000.",
        },
        "timeout": {
            "type": "integer",
            "minimum": 0,
            "description": "Answer with 504 after so many microseconds. 0 and default: the "
            "service's setting, which is also the longest.",
        },
    },
}
_INPUT = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "data": {"description": "The values: flat, row by row, or nested lists."},
        "parameters": {
            "type": "object",
            "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
        },
    },
}
_OUTPUT = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "description": "`<layer>` or `<layer>/<field>`."},
        "parameters": {
            "type": "object",
            "properties": {
                "binary_data": {"type": "boolean"},
                "classification": {"type": "integer", "minimum": 1},
            },
        },
    },
}
INFER_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string"},
                        "parameters": _PARAMETERS,
                        "inputs": {"type": "array", "items": _INPUT},
                        "outputs": {
                            "type": "array",
                            "items": _OUTPUT,
                            "description": "Default: the outputs of the model's metadata.",
                        },
                    },
                },
                "example": {
                    "inputs": [
                        {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 1.5]}
                    ]
                },
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
    "parameters": [_JSON_LENGTH, _CODING],
}
"""The request of ``POST /v2/models/{name}/infer``."""
