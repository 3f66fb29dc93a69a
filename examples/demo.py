"""What ``make demo`` runs: train on real digits, watch it live, infer, check, and stop.

Uses the service that runs already, if one does; else starts one and stops it at the end.
"""

import functools
import json
import socket
import subprocess
import sys
from pathlib import Path

from glasshouse import APIError, Client
from glasshouse.client import Dataset, Job

print = functools.partial(print, flush=True)  # noqa: A001 (in order with what children print)
HERE = Path(__file__).parent
OUT = Path("demo")
WANTED_ACCURACY = 0.97
CLI = [sys.executable, "-m", "glasshouse.cli"]


def is_up() -> bool:
    """Whether a service answers where the client looks for it."""
    try:
        with Client(timeout=5, max_retries=0) as client:
            return bool(client.info())
    except APIError:
        return False


def start() -> None:
    """Start the embedded service: broker, API, one worker. On port 8420, or on a free one."""
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", 8420)) == 0
    print("Starting the service …")
    subprocess.run([*CLI, "up", "--detach", "--port", "0" if taken else "8420"], check=True)


def train(client: Client, digits: Dataset) -> Job:
    """Submit the example network and watch it until it has ended."""
    spec = json.loads((HERE / "digits.json").read_text())
    for source in ("train", "validation"):
        spec["data"][source]["dataset"] = digits.id
    job = client.jobs.create(spec)
    print(
        f"\nTraining {job.id}: a convolutional network on {digits.data['splits']['train']} digits"
    )
    subprocess.run([*CLI, "watch", job.id], check=True)
    return job.wait()


def held_out_accuracy(client: Client, job: Job, digits: Dataset) -> float:
    """Run the digits that training never saw, and count how many are recognised."""
    test = {"dataset": digits.id, "split": "test"}
    outputs = client.infer(job, data=test, outputs=["conv2", "fc"], fields=["value", "id"])
    maps, guesses = outputs["conv2/value"], outputs["fc/id"]
    print(f"\nInference gave two layers' outputs: conv2 {maps.shape}, fc {guesses.shape}")
    rows = digits.rows("test", limit=len(guesses))
    right = sum(int(guess) == row["label"] for guess, row in zip(guesses, rows, strict=True))
    return right / len(guesses)


def main() -> int:
    """Run the demonstration; 0 when the network recognises the digits."""
    began_here = not is_up()
    if began_here:
        start()
    try:
        with Client() as client:
            digits = client.datasets.create(builtin="digits")
            job = train(client, digits)
            accuracy = held_out_accuracy(client, job, digits)
            OUT.mkdir(exist_ok=True)
            (OUT / "loss.png").write_bytes(job.plot("loss"))
            print(f"Accuracy on {digits.data['splits']['test']} held-out digits: {accuracy:.3f}")
            print(f"The loss, as a picture: {OUT / 'loss.png'}")
            print(f"API documentation, while the service runs: {client.url}/docs")
    finally:
        if began_here:
            subprocess.run([*CLI, "down"], check=True)
    print("\nKeep the service with 'make up'; then 'glasshouse open' shows the dashboard.")
    if accuracy < WANTED_ACCURACY:
        print(f"That is less than {WANTED_ACCURACY}: something is wrong.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
