from api.routes.observations.probes import ProbePatch
from api.schemas.inspection import AttachedProbe
from glasshouse.spec import Probe


def test_every_field_of_a_probe_is_shown_and_can_be_changed():
    fields = {*Probe.model_fields}
    assert fields <= {*AttachedProbe.model_fields}
    assert fields == {*ProbePatch.model_fields}
