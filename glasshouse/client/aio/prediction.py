"""The implementation of `AsyncClient.predict` and `AsyncJob.predict`: one request."""

from typing import Any

import httpx2

from glasshouse.client.aio.running import in_thread
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.connection.requests import API, Request, model_in_path
from glasshouse.client.data.predict_bodies import needs_name, predict_body
from glasshouse.client.data.predictions import (
    JobPrediction,
    Prediction,
    read_job_prediction,
    read_prediction,
)
from glasshouse.client.training.specs import PredictOptions, input_fields, wanted_of
from glasshouse.spec.model_names import LATEST, ModelReference


async def predict(
    transport: AsyncTransport, reference: str, inputs: Any, rows: Any, options: PredictOptions
) -> Prediction:
    """Send rows to a served model and decode the response."""
    _check_one(inputs, rows)
    model = model_in_path(reference)
    name = await _only_input(transport, model) if needs_name(inputs, rows) else None
    response = await _sent(transport, f"/models/{reference}", inputs, rows, name, options)
    return read_prediction(response.content, response.headers)


async def predict_with_job(
    transport: AsyncTransport, path: str, inputs: Any, rows: Any, options: PredictOptions
) -> JobPrediction:
    """Send rows to a training job, by its path under ``/api/v1``, and decode the response."""
    _check_one(inputs, rows)
    name = None
    if needs_name(inputs, rows):
        spec = await transport.get(f"{path}/spec", {"resolved": True})
        name = _only(input_fields(spec["network"], spec["data"]["fields"]), "the job")
    response = await _sent(transport, path, inputs, rows, name, options)
    return read_job_prediction(response.content, response.headers)


def _check_one(inputs: Any, rows: Any) -> None:
    if (inputs is None) == (rows is None):
        raise TypeError("give exactly one of inputs and rows")


async def _sent(
    transport: AsyncTransport,
    path: str,
    inputs: Any,
    rows: Any,
    name: str | None,
    options: PredictOptions,
) -> httpx2.Response:
    """Encode a request and send it. ``name``: the only field that the network reads, if needed."""
    wanted = wanted_of(options)
    body = await in_thread(lambda: predict_body(inputs, rows, name, wanted))
    request = Request(
        "POST",
        f"{API}{path}/predict",
        {**body.params, "priority": options.get("priority")},
        {"Content-Type": body.media_type, "Accept": body.accept},
        body.content,
        within_s=options.get("timeout"),
    )
    return await transport.send(request)


async def _only_input(transport: AsyncTransport, model: ModelReference) -> str:
    """Look up the only field that the network of a model reads.

    Raises:
        ValueError: there are several.
    """
    path = f"/models/{model.name}/versions/{model.version or LATEST}"
    version = await transport.get(path)
    found = await transport.get(f"/checkpoints/{version['checkpoint']}/network")
    return _only(input_fields(found["network"], found["fields"]), model.name)


def _only(names: list[str], of: str) -> str:
    if len(names) == 1:
        return names[0]
    detail = f"{of} reads several fields ({', '.join(names)})"
    raise ValueError(f"{detail}: pass inputs as a dict by field, or rows as a list of dicts")
