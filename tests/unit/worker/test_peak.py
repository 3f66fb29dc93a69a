from models.settings import Settings
from models.tables import Device
from worker.attempt.launch import peak_flops
from worker.devices import inventory


def device(kind: str, name: str = "x") -> Device:
    return Device(kind=kind, name=name)


def test_the_peak_of_several_cores_is_that_of_one_times_their_number():
    assert peak_flops([device("cpu")] * 3, {"core_flops": 2e9}) == 6e9
    assert peak_flops([device("cpu")], {}) is None


def test_a_cuda_device_is_known_by_its_whole_name():
    assert peak_flops([device("cuda", "Tesla T4")], {"core_flops": 2e9}) == 8.1e12
    split = device("cuda", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert peak_flops([split], {}) is None
    assert peak_flops([device("cuda", "Tesla T4"), split], {}) is None
    beside = [device("cuda", "Tesla T4"), device("cpu"), device("cpu")]
    assert peak_flops(beside, {"core_flops": 2e9}) == 8.1e12, "cores beside it do not count"


def test_a_core_is_measured_only_when_asked_to():
    settings = Settings(redis_url="unix:///tmp/v.sock", worker_name="w1")
    _, info = inventory.ask(settings)
    assert "core_flops" not in info
    _, info = inventory.ask(settings, measure=True)
    assert 1e8 < info["core_flops"] < 1e13
