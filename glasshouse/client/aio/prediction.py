"""The implementation of `AsyncClient.predict`: one request to a served model."""

from typing import Any

from glasshouse.client.aio.running import in_thread
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.connection.requests import API, Request, model_in_path
from glasshouse.client.data.predict_bodies import needs_name, predict_body
from glasshouse.client.data.predictions import Prediction, read_prediction
from glasshouse.client.training.specs import PredictOptions, input_fields, wanted_of
from glasshouse.spec.model_names import LATEST, ModelReference


async def predict(
    transport: AsyncTransport, reference: str, inputs: Any, rows: Any, options: PredictOptions
) -> Prediction:
    """Encode a request, send it and decode the response."""
    if (inputs is None) == (rows is None):
        raise TypeError("give exactly one of inputs and rows")
    model = model_in_path(reference)
    name = await _only_input(transport, model) if needs_name(inputs, rows) else None
    wanted = wanted_of(options)
    body = await in_thread(lambda: predict_body(inputs, rows, name, wanted))
    request = Request(
        "POST",
        f"{API}/models/{reference}/predict",
        {**body.params, "priority": options.get("priority")},
        {"Content-Type": body.media_type, "Accept": body.accept},
        body.content,
        within_s=options.get("timeout"),
    )
    response = await transport.send(request)
    return read_prediction(response.content, response.headers)


async def _only_input(transport: AsyncTransport, model: ModelReference) -> str:
    """Look up the only field that the network of a model reads.

    Raises:
        ValueError: there are several.
    """
    path = f"/models/{model.name}/versions/{model.version or LATEST}"
    version = await transport.get(path)
    found = await transport.get(f"/checkpoints/{version['checkpoint']}/network")
    names = input_fields(found["network"], found["fields"])
    if len(names) == 1:
        return names[0]
    detail = f"{model.name} reads several fields ({', '.join(names)})"
    raise ValueError(f"{detail}: pass inputs as a dict by field, or rows as a list of dicts")
