"""The documents of predictions, for the OpenAPI description; replicas read and write them."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Prediction(BaseModel):
    """What a model computed."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    outputs: dict[str, Any]
    """By `<layer>/<field>`: a list with an entry for each row."""
    model: str
    """The name of the model."""
    version: int
    """The version that answered."""
    non_finite: list[str] = []
    """The outputs with NaN or Infinity, if there are any."""


class JobPrediction(BaseModel):
    """What a training job computed with its current weights."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    outputs: dict[str, Any]
    """By `<layer>/<field>`: a list with an entry for each row."""
    job: str
    """The id of the job."""
    step: int
    """The number of updates that the weights had."""
    non_finite: list[str] = []
    """The outputs with NaN or Infinity, if there are any."""


_TEXT = {"type": "string"}
_LIST = {"type": "array", "items": _TEXT}
PREDICT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "description": "Give exactly one of `inputs` and `rows`.",
                    "properties": {
                        "inputs": {
                            "type": "object",
                            "description": "Values of the network's fields by name, as nested "
                            "lists whose first axis is the rows; of sequences also texts.",
                        },
                        "rows": {
                            "type": "array",
                            "items": {"type": "object"},
                            "description": "Rows as in the training data: values by column. An "
                            'image is `{"image": {"base64": "…"}}`, a PNG or JPEG file.',
                        },
                        "outputs": {
                            **_LIST,
                            "description": "Layers to return. Default: those of the network.",
                        },
                        "fields": {
                            **_LIST,
                            "description": "`value`, `id`, `prob`, `top_k`, as of an `infer` job. "
                            "Default: `value`; for scores of classes also `id` and `prob`.",
                        },
                        "top_k": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "The number of entries of the field `top_k`, which is "
                            "then also returned.",
                        },
                    },
                },
                "example": {"rows": [{"text": "a fine film"}], "fields": ["prob", "id"]},
            },
            "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
            "application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}},
        },
    },
    "parameters": [
        {
            "name": "timeout_s",
            "in": "query",
            "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 600},
            "description": "Answer with 504 after this time. Default: the service's setting.",
        },
        {
            "name": "priority",
            "in": "query",
            "schema": {"type": "integer", "minimum": -1000, "maximum": 1000, "default": 0},
            "description": "Requests with a higher priority are computed first.",
        },
        *(
            {"name": name, "in": "query", "schema": schema, "description": description}
            for name, schema, description in (
                ("outputs", _TEXT, "Of a binary body: as in JSON, separated by commas."),
                ("fields", _TEXT, "Of a binary body: as in JSON, separated by commas."),
                ("top_k", {"type": "integer", "minimum": 1}, "Of a binary body: as in JSON."),
                (
                    "input",
                    _TEXT,
                    "The field that the array of an npy body is for, if there are several.",
                ),
            )
        ),
    ],
}
"""The request of `POST /models/{name}/predict` and `POST /jobs/{id}/predict`."""
