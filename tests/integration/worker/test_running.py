"""Jobs through a real worker process: Celery, nursery, engine, Valkey, SQL."""

from tests.integration.worker.shop import Shop, train_spec


def test_a_job_runs_to_its_end(shop: Shop):
    shop.start_worker()
    job_id = shop.submit(train_spec(shop.dataset()))
    job = shop.wait(job_id)
    assert job.state == "succeeded", (job.error, shop.logs())
    seqs = [event.seq for event in shop.events(job_id)]
    assert seqs == list(range(1, len(seqs) + 1))
    types = [event.type for event in shop.events(job_id)]
    assert types[-2:] == ["state", "end"]
    assert types.count("end") == 1
    steps = [payload["step"] for payload in shop.payloads(job_id, "metrics")]
    assert steps == list(range(20))
    assert job.progress["step"] == 19
    assert job.summary["loss"]["min"] <= job.summary["loss"]["max"]
    assert all(device.job is None for device in shop.devices())
